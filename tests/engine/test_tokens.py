"""Runs that are as long as a number of tokens."""

import json
from pathlib import Path

import pytest

from tests.runs import metrics, run, run_in_two_parts, settings, weights_hash

SCHEDULE = {"lr": 3e-3, "schedule": "linear", "min_lr_ratio": 0.0, "unit": "tokens", "warmup": 4}


def by_tokens(directory: Path, tokens: int, **runtime) -> dict:
    config = settings(directory, "sft", steps=None, epochs=50, tokens=tokens, eval_at_start=False, **runtime)
    config["models"]["trainer"]["optimizer"] = dict(SCHEDULE)
    return config


def test_the_run_and_its_schedule_end_with_the_tokens(tmp_path):
    config = by_tokens(tmp_path, 40)
    assert run(config) == 0
    so_far = 0
    for line in metrics(config):
        assert so_far < 40
        so_far += int(line["tokens/trained"])
        place = so_far - 1  # of the last token of the step
        expected = 3e-3 * (1.0 - min(1.0, (place - 4) / (40 - 1 - 4)))
        assert place >= 4 and line["loss/lr"] == pytest.approx(expected)
    assert so_far >= 40 and line["loss/lr"] == 0.0
    assert "eval/loss/value" in line  # the end of the run is evaluated
    state = Path(config["output"]) / "checkpoints" / f"step_{line['step']}" / "state.json"
    assert json.loads(state.read_text())["tokens"] == so_far


def test_a_restart_goes_on_counting(tmp_path):
    whole = by_tokens(tmp_path, 60)
    run(whole)
    halves = run_in_two_parts(whole)
    last = metrics(whole)[-1]["step"]
    assert metrics(halves)[-1]["step"] == last > 3
    assert weights_hash(halves, last) == weights_hash(whole, last)
