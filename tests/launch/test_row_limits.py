"""A row that is too long for a model of the run follows `data.on_long` before the first step, with its place."""

from __future__ import annotations

import json

import pytest

from coalign import load_config
from coalign.data.loader import Loader
from coalign.launch.data_load import load_data
from coalign.launch.plan import prepare
from tests.runs import COMPARING, compared, metrics, row, run, settings, show_check

ROWS, LONG = 30, "1" * 300  # of 256 tokens that a model reads at once
CASES = {
    "sft": ({"answer": LONG}, "307 tokens"),
    "dpo": ({"prompt": "1" * 150}, "sequences of 153, 153"),  # too long only together
    "orpo": ({"chosen": LONG}, "sequences of 307, 9"),
    "kto": ({"answer": LONG}, "301 of response"),
    "reward_model": ({"prompt": "1" * 200}, "sequences of 203, 203"),
    "process_reward": ({"prompt": LONG}, "300 tokens of prompt"),
    "grpo": ({"prompt": LONG}, "300 tokens"),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("limits")


def configured(home, algorithm, change, *, rows=ROWS, **data):
    """A run whose last row but 9 (the first of a few) has ``change``."""
    config, make = settings(home, algorithm), compared if algorithm in COMPARING else row
    lines = [make(i) for i in range(rows)]
    lines[rows - 10 if rows > 10 else 0] |= change
    if algorithm == "kto":
        lines = [{key: line[key] for key in ("prompt", "answer", "label")} for line in lines]
    (home / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config["data"] = {"train": str(home / "rows.jsonl"), "chat_template": "none", **data}
    return config


def load(config) -> Loader:
    return load_data(prepare(load_config(config))).train


@pytest.mark.parametrize("algorithm", CASES)
def test_a_row_that_is_too_long(home, algorithm, caplog):
    change, why = CASES[algorithm]
    config = configured(home, algorithm, change)
    assert load(config).rows == ROWS - 1
    assert "rows.jsonl:21: " in caplog.text and why in caplog.text and "max_tokens_per_micro" in caplog.text
    said = show_check(config)
    assert f"{ROWS} rows, {ROWS - 1} used, 1 over " in said and "rows.jsonl:21: " in said
    for refuse in (load, show_check):
        with pytest.raises(ValueError, match=rf"rows\.jsonl:21: .*{why}.*max_tokens_per_micro"):
            refuse(configured(home, algorithm, change, on_long="error"))


def test_check_reads_more_than_the_first_rows(home):
    assert "rows.jsonl:691: a sequence of it has 309 tokens" in show_check(
        configured(home, "sft", {"answer": LONG}, rows=700)
    )


def test_what_is_cut_fits_together(home):
    data = load(configured(home, "dpo", {"prompt": "1" * 150}, on_long="truncate_left"))
    lengths = [data.next(rows=1).lengths.tolist() for _ in range(ROWS)]
    assert max(map(sum, lengths)) == 256 and data.rows == ROWS


def test_a_document_becomes_pieces_that_the_model_reads(home):
    data = load(configured(home, "pretrain", {"text": LONG}))
    assert max(max(data.next(rows=1).lengths.tolist()) for _ in range(ROWS)) == 256


def test_the_context_of_a_model_is_a_limit_too(home):
    config = configured(home, "sft", {"answer": "1" * 2100})
    config["models"]["trainer"]["max_tokens_per_micro"] = None
    assert load(config).rows == ROWS - 1
    config["data"]["on_long"] = "error"
    with pytest.raises(ValueError, match=r":21: .*2048 are .*max_position_embeddings of models\.trainer"):
        load(config)


def test_prompts_that_the_cache_of_the_policy_does_not_hold(home):
    config = configured(home, "grpo", {"prompt": "1" * 100}, on_long="error")
    config["models"]["policy"]["native"] = {"kv_tokens": 100}
    with pytest.raises(ValueError, match=r":21: .*100 tokens, and 92 are .*native\.kv_tokens less sampling\.max_new_"):
        load(config)


def test_prompts_after_which_a_response_is_cut_short_are_named(home):
    config = configured(home, "grpo", {"prompt": "1" * 252})
    assert "warning: after 1 of these prompts a response ends before its 8 tokens" in show_check(config)


def test_no_row_is_short_enough(home):
    config = configured(home, "sft", {}, rows=4)
    config["models"]["trainer"]["max_tokens_per_micro"] = 3
    for refuse in (load, show_check):
        with pytest.raises(ValueError, match=r"no usable rows .*the first: .*rows\.jsonl:1: .*, and 3 are what"):
            refuse(config)


def test_a_stream_says_so_when_the_row_is_drawn(home, caplog):
    change = {"answer": LONG}
    data = load(configured(home, "sft", change, stream=True, shuffle=False))
    data.next(rows=ROWS - 1)
    assert "rows.jsonl:21: " in caplog.text and data.stats()["data/dropped"].value == 1
    data = load(configured(home, "sft", change, stream=True, shuffle=False, on_long="error"))
    data.next(rows=20)
    with pytest.raises(ValueError, match=r"rows\.jsonl:21: "):
        data.next(rows=1)


def test_a_cache_is_that_of_its_limits(home, tmp_path):
    config = configured(home, "sft", {"answer": LONG}, cache=str(tmp_path))
    assert load(config).rows == ROWS - 1
    config["models"]["trainer"]["max_tokens_per_micro"] = 512
    assert load(config).rows == ROWS


def test_a_run_goes_past_the_row_that_no_model_reads(home, tmp_path):
    config = configured(home, "dpo", {"prompt": "1" * 150}, rows=8) | {"output": str(tmp_path / "run")}
    assert run(config) == 0 and len(metrics(config)) == 4


def test_steps_of_kto_have_two_rows_whatever_their_tokens(home, tmp_path):
    config = configured(home, "kto", {}, rows=9) | {"output": str(tmp_path / "run")}  # of 12 tokens or so
    config["data"]["eval"] = config["data"]["train"]  # in batches of 4, with one row over
    assert run(config, "runtime.tokens_per_step=5", "runtime.eval_at_start=true") == 0
    (home / "one.jsonl").write_text((home / "rows.jsonl").read_text().split("\n")[0])
    config["data"]["eval"] = str(home / "one.jsonl")
    with pytest.raises(ValueError, match=r"data\.eval: 1 usable row is of 'one', and `kto` needs 2"):
        run(config | {"output": str(tmp_path / "other")})


def test_responses_to_other_prompts_are_cut_where_both_are_too_long(home, tmp_path):
    config = configured(home, "kto", {}, rows=4) | {"output": str(tmp_path / "run")}
    lines = [{"prompt": "1" * 200, "answer": "2", "label": True}, {"prompt": "1", "answer": "2" * 200, "label": False}]
    (home / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert run(config, "runtime.prompts_per_step=2") == 0
