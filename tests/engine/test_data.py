"""Runs on streams, token budgets, phases and cached sources: what they end with, and where."""

import math

import pytest

from coalign.data.examples import RowEncoder
from tests.runs import metrics, run, settings, stopping_after, weights_hash

STREAM = {"stream": True, "stream_window": 10}
PHASES = {"phases": {"sft": 2, "rm": 1}, "phase": "sft"}


def configured(directory, data, algorithm="sft", output="run", **runtime):
    config = settings(directory, algorithm, eval_at_start=False, **runtime)
    return config | {"data": config["data"] | data, "output": str(directory / output)}


@pytest.mark.parametrize(
    ("algorithm", "data"),
    [("sft", STREAM | PHASES), pytest.param("dpo", {}, marks=pytest.mark.slow)],
    ids=["sft-stream-phase", "dpo-scan"],
)
def test_a_stopped_run_ends_with_the_same_weights(tmp_path, data, algorithm):
    options = {"algorithm": algorithm, "tokens_per_step": 70, "steps": 3}
    whole, resumed = (configured(tmp_path, data, output=name, **options) for name in ("whole", "resumed"))
    run(whole)
    with stopping_after(1):
        run(resumed)
    assert len(metrics(resumed)) == 1
    run(resumed)
    assert weights_hash(resumed, 3) == weights_hash(whole, 3)
    for key in ("loss/value", "data/epoch"):
        assert [line[key] for line in metrics(resumed)] == [line[key] for line in metrics(whole)]


def test_a_cached_run_ends_with_the_same_weights_and_tokenises_once(tmp_path, monkeypatch):
    plain = configured(tmp_path, {}, output="plain", steps=2)
    run(plain)
    for name in ("first", "second"):
        cached = configured(tmp_path, {"cache": str(tmp_path / "cache"), "eval": []}, output=name, steps=2)
        run(cached)
        assert weights_hash(cached, 2) == weights_hash(plain, 2)
        monkeypatch.setattr(RowEncoder, "use", lambda *_: pytest.fail("went through the rows again"))


def test_a_stream_ends_with_its_tokens(tmp_path, caplog):
    config = configured(tmp_path, STREAM, steps=None, tokens=100)
    config["models"]["trainer"]["optimizer"]["unit"] = "tokens"
    with caplog.at_level("INFO"):
        run(config)
    trained = [line["tokens/trained"] for line in metrics(config)]
    assert sum(trained[:-1]) < 100 <= sum(trained)
    rows = 4 * len(trained)
    assert f"a stream, {rows} rows so far: {rows} used" in caplog.text
    assert metrics(config)[-1]["data/epoch"] == math.floor((rows - 1) / 24)
