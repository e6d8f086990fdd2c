"""`coalign score`: the kinds of rows, what the numbers are, going on after a kill, bad input."""

import json

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from typer.testing import CliRunner

from coalign.backends.hf.fsdp import FSDPModule
from coalign.cli import app
from coalign.config.schema import DataConfig, SourceConfig
from coalign.report.display import Display
from coalign.rewards.calls import RewardError
from coalign_serve import score as scoring
from coalign_serve.config.stages import ScoreConfig
from coalign_serve.resumable import ResumableOutput
from coalign_serve.score import score
from packages.serve.tests.interruption import Killed, kill_after, read_rows, write_rows
from tests.tiny import tiny_model_dir, tiny_reward_model_dir

ASKED = {"role": "user", "content": "1+1="}
SAID = {"role": "assistant", "content": "2, I think"}


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    return tiny_reward_model_dir(tmp_path_factory.mktemp("judge"), seed=3)


def settings(path, **changes):
    data = changes.pop("data", DataConfig(train=[SourceConfig(path=str(path))]))
    return ScoreConfig(data=data, **changes)


def scored(path, tmp_path, **changes):
    display = Display(quiet=True, err=Console(quiet=True))
    counts = score(settings(path, **changes), tmp_path / "scored.jsonl", display, overwrite=True)
    return read_rows(tmp_path / "scored.jsonl"), counts


LENGTH = [{"fn": "packages.serve.tests.functions:by_length"}]


def expected(judge, messages):
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(judge), AutoTokenizer.from_pretrained(judge)
    tokens = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False).rstrip("\n"))["input_ids"]
    with torch.no_grad():
        return float(model.score(model.model(torch.tensor([tokens])).last_hidden_state[0, -1]))


def test_a_reward_model_over_every_kind_of_row(judge, tmp_path):
    worse = {"role": "assistant", "content": "3"}
    system = {"role": "system", "content": "Be brief."}
    path = write_rows(
        tmp_path / "rows.jsonl",
        {"prompt": "1+1=", "response": SAID["content"]},
        {"prompt": [system, ASKED], "response": SAID["content"], "extra": 5},
        {"messages": [ASKED, SAID]},
        {"prompt": "1+1=", "messages": [ASKED], "response": SAID["content"], "group": 7},
        {"prompt": "1+1=", "chosen": SAID["content"], "rejected": worse["content"]},
        {"chosen": [ASKED, SAID], "rejected": [ASKED, worse]},
        # generated from a pair's prompt
        {"prompt": "1+1=", "chosen": "a", "rejected": "b", "response": SAID["content"]},
    )
    rows, _ = scored(path, tmp_path, reward_model=str(judge))
    right, wrong = expected(judge, [ASKED, SAID]), expected(judge, [ASKED, worse])
    assert abs(right - wrong) > 0.01
    near = lambda value: pytest.approx(value, abs=1e-5)  # noqa: E731
    assert [rows[i]["score"] for i in (0, 2, 3, 6)] == near([right] * 4)
    assert rows[1]["score"] == near(expected(judge, [system, ASKED, SAID])) and rows[1]["extra"] == 5
    for pair in rows[4:6]:
        assert (pair["chosen_score"], pair["rejected_score"]) == near((right, wrong))


def test_pair_accuracy_and_spread(tmp_path):
    pairs = [("long", "s"), ("s", "long"), ("same", "size")]
    path = write_rows(tmp_path / "p.jsonl", *({"prompt": "q", "chosen": a, "rejected": b} for a, b in pairs))
    rows, counts = scored(path, tmp_path, reward=LENGTH)
    assert [(r["chosen_score"], r["rejected_score"]) for r in rows] == [(4.0, 1.0), (1.0, 4.0), (4.0, 4.0)]
    assert counts.pop("std") == pytest.approx(2**0.5) and counts.pop("pair_accuracy") == 0.5  # right, wrong, a tie
    assert counts == {"rows": 3, "scored": 6, "unscored": 0, "mean": 3.0, "min": 1.0, "max": 4.0, "pairs": 3}


def test_several_functions_are_summed_by_weight(tmp_path):
    path = write_rows(tmp_path / "r.jsonl", {"prompt": "q", "response": "four"})
    reward = [*LENGTH, {"fn": "regex", "pattern": "f.*", "weight": 10.0}, {"fn": "contains", "weight": 0.0}]
    (row,), _ = scored(path, tmp_path, reward=reward)  # `contains` fails without an answer: it is only looked at
    assert row["score"] == 14.0 and row["rewards"] == {"by_length": 4.0, "regex": 1.0}


def test_a_group_is_scored_together(tmp_path, monkeypatch):
    monkeypatch.setattr(scoring, "CHUNK", 2)
    said = [("a", 0), ("bb", 0), ("ccc", 0), ("d", 1), ("e", None), ("f", None)]
    rows = [{"prompt": "q", "response": text} | ({} if g is None else {"group": g}) for text, g in said]
    reward = ["packages.serve.tests.functions:rank_in_group"]
    found, _ = scored(write_rows(tmp_path / "g.jsonl", *rows), tmp_path, reward=reward)
    assert [row["score"] for row in found] == [3.0, 3.0, 4.0, 2.0, 2.0, 2.0]


def test_empty_responses(judge, tmp_path):
    rows = [{"prompt": "q", "response": ""}, {"prompt": "q", "response": "x"}]
    reward = [{"fn": "packages.serve.tests.functions:fails_on_empty", "retries": 0}]
    found, counts = scored(write_rows(tmp_path / "e.jsonl", *rows), tmp_path, reward=reward)
    assert [row["score"] for row in found] == [None, 1.0] and counts["unscored"] == 1
    found, _ = scored(tmp_path / "e.jsonl", tmp_path, reward_model=str(judge))
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]
    assert found[0]["score"] == pytest.approx(expected(judge, said), abs=1e-5)
    pair = write_rows(tmp_path / "p.jsonl", {"prompt": "q", "chosen": "", "rejected": "b"}, rows[1])
    found, counts = scored(pair, tmp_path, reward=LENGTH)
    assert found[0]["score"] is None and found[1]["score"] == 1.0 and counts["unscored"] == 1
    with pytest.raises(ValueError, match=r"p\.jsonl:1: "):
        data = DataConfig(train=[SourceConfig(path=str(pair))], on_empty="error")
        scored(pair, tmp_path, data=data, reward=LENGTH)


def test_beyond_the_reward_models_context(judge, tmp_path):
    path = write_rows(tmp_path / "l.jsonl", {"prompt": "q", "response": "x" * 2100}, {"prompt": "q", "response": "x"})
    err = Console(record=True, width=200)
    score(settings(path, reward_model=str(judge)), tmp_path / "out.jsonl", Display(err=err))
    rows = read_rows(tmp_path / "out.jsonl")
    assert rows[0]["score"] is None and rows[1]["score"] is not None
    said = err.export_text()
    assert "1 long; first: group 0, index 0 has 2" in said and "l.jsonl:1)" in said
    cut, refused = (
        settings(path, reward_model=str(judge), data=DataConfig(train=[SourceConfig(path=str(path))], on_long=policy))
        for policy in ("truncate_left", "error")
    )
    assert score(cut, tmp_path / "cut", Display(err=err))["scored"] == 2
    with pytest.raises(ValueError, match=r"group 0, index 0 has 2\d+ tokens; .*l\.jsonl:1"):
        score(refused, tmp_path / "refused", Display(err=err))


def test_on_the_command_line(judge, tmp_path):
    path = write_rows(tmp_path / "r.jsonl", {"prompt": "q", "chosen": "long", "rejected": "s"})
    out = tmp_path / "out.jsonl"
    options = ["-i", str(path), "-o", str(out)]
    result = CliRunner().invoke(app, ["score", str(judge), *options])
    assert result.exit_code == 0 and "pair_accuracy" in result.stdout
    options.append("--overwrite")
    assert CliRunner().invoke(app, ["score", *options, "--reward", LENGTH[0]["fn"]]).exit_code == 0
    assert json.loads(out.read_text())["chosen_score"] == 4.0
    reward = "{fn: regex, pattern: l.*, weight: 2.0}"
    assert CliRunner().invoke(app, ["score", *options, "--reward", reward]).exit_code == 0
    assert json.loads(out.read_text())["chosen_score"] == 2.0
    assert "give either MODEL" in str(CliRunner().invoke(app, ["score", *options]).exception)


def test_a_killed_call_goes_on_with_the_same_numbers(judge, tmp_path, monkeypatch):
    monkeypatch.setattr(scoring, "CHUNK", 2)
    path = write_rows(tmp_path / "r.jsonl", *({"prompt": f"{i}", "response": "x" * i} for i in range(1, 8)))
    whole, counts = scored(path, tmp_path, reward_model=str(judge))
    (tmp_path / "scored.jsonl").unlink()
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after(patch, ResumableOutput, "add", 2)
        scored(path, tmp_path, reward_model=str(judge))
    calls, real = [], FSDPModule.forward_step
    monkeypatch.setattr(FSDPModule, "forward_step", lambda self, b: (calls.append(len(b)), real(self, b))[1])
    assert scored(path, tmp_path, reward_model=str(judge)) == (whole, counts)
    assert calls == [2, 1]


ROW = {"prompt": "q", "response": "r"}
WRONG = [
    ([ROW, {"prompt": "q", "answer": "r"}], {"reward": LENGTH}, r"rows\.jsonl:2: nothing to score: .*nor "),
    ([{"question": "q", "response": "r"}], {"reward": LENGTH}, r":1: no key 'prompt'; the row has question, r"),
    ([], {"reward": LENGTH}, r"rows\.jsonl holds no rows"),
    ([ROW], {"reward": [{"fn": "math", "retries": 0}]}, "no response could be scored; .*has no 'answer' to compare"),
    ([ROW], {}, "nothing to score with: give `reward`"),
    ([ROW], {"reward": LENGTH, "reward_model": "judge"}, "there is a `reward` as well"),
]


@pytest.mark.parametrize(("rows", "changes", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_what_is_wrong_is_said(tmp_path, rows, changes, message):
    with pytest.raises((ValueError, RewardError), match=message):
        scored(write_rows(tmp_path / "rows.jsonl", *rows), tmp_path, **changes)
    assert not (tmp_path / "scored.jsonl").exists()


def test_files_that_are_not_there_or_no_reward_model(tmp_path):
    good = write_rows(tmp_path / "good.jsonl", ROW)
    with pytest.raises(FileNotFoundError, match=r"god\.jsonl does not exist; did you mean .*good\.jsonl"):
        scored(tmp_path / "god.jsonl", tmp_path, reward=LENGTH)
    tiny_model_dir(tmp_path / "lm")
    with pytest.raises(ValueError, match=r"lacks \['score.weight'\] for a model with head 'reward'; it was not"):
        scored(good, tmp_path, reward_model=str(tmp_path / "lm"))
