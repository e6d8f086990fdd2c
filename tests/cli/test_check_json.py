"""`coalign check --json`: one object on stdout, whatever is wrong, and an exit code."""

from __future__ import annotations

import json
import sys

import pytest

from coalign import cli
from tests.runs import settings


@pytest.fixture
def ask(tmp_path, monkeypatch, capsys):
    def ask(config, *words):
        file = tmp_path / "run.yaml"
        file.write_text(json.dumps(config, indent=1) if isinstance(config, dict) else config)
        monkeypatch.setattr(sys, "argv", ["coalign", "check", str(file), "--json", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, capsys.readouterr().out

    return ask


def test_it_holds_what_the_text_says(tmp_path, ask):
    code, out = ask(settings(tmp_path, "grpo"))
    told = json.loads(out)
    assert code == 0 and told["problems"] == told["warnings"] == []
    assert (told["algorithm"], told["steps"], told["epochs"]) == ("grpo", 4, None)
    assert [model["role"] for model in told["models"].values()] == ["Rollout", "Trainable", "Scorer"]
    assert told["flow"][1]["label"] == "policy.generate" and "reward" in told["flow"][3]["makes"]
    assert [(source["split"], source["rows"], source["used"]) for source in told["data"]] == [
        ("train", 24, 24),
        ("eval", 24, 24),
    ]
    assert told["reward"][0]["fn"] == "tests.digits:digits"
    (policy,) = told["memory"]["policy"]
    assert policy["total"] == policy["weights"] + policy["cache"]
    assert told["demands"][0]["bytes"] < told["demands"][0]["usable"]
    assert told["notes"][0].startswith("host memory: ")


def test_warnings_are_listed(tmp_path, ask):
    code, out = ask(settings(tmp_path, "sft", prompts_per_step=100))
    assert code == 0 and json.loads(out)["warnings"] == [
        "runtime.prompts_per_step is 100, and data.train has 24 rows: a step repeats some"
    ]


@pytest.mark.parametrize(
    ("override", "key", "line", "message"),
    [
        ("models.trainer.lrr=1", "models.trainer.lrr", None, "unknown key"),
        ("runtime.steps=0", "runtime.steps", None, "is 0; expected"),
        ("models.trainer.max_tokens_per_micro=4", "models.trainer.max_tokens_per_micro", None, "is 4, and a response"),
        ("models.trainer.tensor_parallel=3", "models.trainer.tensor_parallel", None, "does not divide the 2 heads"),
        ("data.answer_key=gold", "reward", "reward", ""),
        ("data.train=/nowhere.jsonl", "data.train", None, "nowhere"),
        ("nonsense", None, None, "expected key=value"),
    ],
)
def test_problems_have_key_place_and_message(tmp_path, ask, override, key, line, message):
    config = settings(tmp_path, "grpo")
    if override.startswith("data.answer_key"):
        config["reward"] = {"fn": "exact", "answer_key": "gold"}
    code, out = ask(config, override)
    problems = json.loads(out)["problems"]
    assert code == 1 and (problems[0]["key"] or "").startswith(key or "") and message in problems[0]["message"]
    if key and not line:
        assert problems[0]["file"] == f"override '{override}'" and problems[0]["line"] is None


def test_lines_of_the_file_are_named_and_facts_found_before_stay(tmp_path, ask):
    config = settings(tmp_path, "sft")
    (tmp_path / "sft.jsonl").write_text('{"other": 1}\n')
    told = json.loads(ask(config)[1])
    (problem,) = told["problems"]
    assert problem["file"] == str(tmp_path / "run.yaml") and isinstance(problem["line"], int)
    assert problem["key"].startswith("data.train") and told["algorithm"] == "sft"


def test_a_file_that_is_no_yaml_and_a_fault_in_code_are_problems_too(tmp_path, ask):
    code, out = ask("models: [")
    assert code == 1 and json.loads(out)["problems"][0]["message"]
    (tmp_path / "broken_loss.py").write_text("def loss(:\n")
    sys.path.insert(0, str(tmp_path))
    try:
        code, out = ask(settings(tmp_path, "sft") | {"loss": {"fn": "broken_loss:loss"}})
    finally:
        sys.path.remove(str(tmp_path))
    assert code == 1 and "broken_loss" in json.loads(out)["problems"][0]["message"]


def test_what_code_prints_does_not_reach_stdout(tmp_path, ask, monkeypatch):
    (tmp_path / "loud_reward.py").write_text("print('loaded')\n\ndef loud(sample):\n    print('hi')\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    code, out = ask(settings(tmp_path, "grpo") | {"reward": {"fn": "loud_reward:loud"}})
    assert code == 0 and json.loads(out)["reward"][0]["name"] == "loud"
