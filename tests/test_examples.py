"""The data of the examples, and the code of docs/writing_a_reward.md. tests/docs runs the commands of pages."""

from __future__ import annotations

import asyncio
import json
import random
import re
from importlib.metadata import version
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from coalign.cli import app
from coalign_graders.math_answer import math
from examples.gsm8k import make_data
from examples.smollm2.data import clean
from examples.word_problems import PATTERNS, solve, spoil, write_files
from tests.rewards.samples import sample
from tests.runs import ROOT


def test_the_code_of_the_page_on_rewards_runs():
    page = (ROOT / "docs/writing_a_reward.md").read_text()
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, names)  # of our own making; it has an assertion of its own
    short, long = sample("Thanks"), sample("A longer answer.")
    assert names["polite"](short) == 1.0 and names["shortest_wins"]([short, long]) == [1.0, 0.0]
    assert names["answer_length"](long) == {"reward": -0.03, "words": 3}
    with pytest.raises(ValueError, match="expected low <= high"):
        names["within"].check(low=3, high=2)
    names |= {
        "theirs": lambda completions, answer: [
            float(c[0]["content"] == a) for c, a in zip(completions, answer, strict=False)
        ]
    }
    names["compute_score"] = lambda data_source, solution, truth, extra: float(
        data_source == "gsm8k" and solution == truth
    )
    names["reward_func"] = lambda queries, prompts, labels: {
        "rewards": torch.tensor([float(q == x) for q, x in zip(queries, labels, strict=False)])
    }
    row = {"data_source": "gsm8k", "reward_model": {"ground_truth": "7"}, "extra_info": {}}
    assert names["from_trl"](sample("7", answer="7")) == 1.0 and names["from_verl"](sample("7", **row)) == 1.0
    assert names["from_openrlhf"]([sample("7", label="7"), sample("8", label="7")]) == [1.0, 0.0]


def grade(response: str, answer: str) -> float:
    return asyncio.run(math(sample(response, answer=answer)))


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.__name__)
def test_made_problems_are_solved_rightly(pattern):
    draw = random.Random(3)
    for _ in range(20):
        _, steps = pattern(draw, "Ann", "Ben", "shells")
        for _, how, value in steps:
            assert eval(how) == value >= 0  # of our own making
        right = solve(steps, "#### ")
        assert all(f"={value}>>{value}." in right for _, _, value in steps)
        assert grade(solve(steps, "A: "), right) == 1.0 and grade(solve(spoil(draw, steps), "A: "), right) == 0.0


def test_made_files_serve_every_example(tmp_path, monkeypatch):
    write_files(tmp_path, train=20, test=20)
    monkeypatch.setenv("GSM8K", str(tmp_path))
    make_data(tmp_path)
    rows = {path.stem: [json.loads(line) for line in path.read_bytes().splitlines()] for path in tmp_path.iterdir()}
    assert rows["pairs_train"] and rows["pairs_eval"] and rows["labelled_train"] and rows["scored_eval"]
    held_out = {row["prompt"] for row in rows["labelled_eval"]}
    assert held_out.isdisjoint(row["prompt"] for row in rows["labelled_train"])
    assert held_out <= {row["question"] for row in rows["gsm8k_test"]}


def test_a_solution_loses_its_marks_and_keeps_its_answer():
    assert clean("2+3 = <<2+3=5>>5 apples\nA: 5") == "2+3 = 5 apples\n#### 5"
    assert clean("He has <<4*2=8>>8.\n#### 8") == "He has 8.\n#### 8"


def test_the_version_and_completion_are_there():
    said = CliRunner().invoke(app, ["--version"])
    assert (said.exit_code, said.output.strip()) == (0, f"coalign {version('coalign')}")
    assert "--install-completion" in CliRunner().invoke(app, ["--help"]).output
    asked = {"_COALIGN_COMPLETE": "complete_bash", "COMP_WORDS": "coalign init gr", "COMP_CWORD": "2"}
    assert CliRunner().invoke(app, [], prog_name="coalign", env=asked).output.split() == ["grpo"]
