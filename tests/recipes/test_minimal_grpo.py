"""examples/minimal_grpo.py: the loop on the backends alone learns, and docs/start.md shows its lines."""

import re
import runpy
import sys
from importlib import import_module
from statistics import mean

import torch

from tests.runs import ROOT
from tests.tiny import tiny_model_dir

FILE = ROOT / "examples" / "minimal_grpo.py"


def test_the_reward_climbs(capsys, monkeypatch):
    """Run as a program, but in this process, which has imported everything."""
    monkeypatch.syspath_prepend(FILE.parent)
    monkeypatch.setattr(sys, "argv", [str(FILE)])
    with torch.random.fork_rng(devices=[]):
        runpy.run_path(str(FILE), run_name="__main__")
    shown = capsys.readouterr().out
    rewards = [float(found) for found in re.findall(r"reward (\S+)", shown)]
    assert len(rewards) > 10 and mean(rewards[-3:]) > mean(rewards[:3]) + 0.3


def test_it_takes_a_model(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(FILE.parent)
    minimal = import_module("minimal_grpo")
    monkeypatch.setattr(minimal, "STEPS", 2)
    assert len(minimal.train(str(tiny_model_dir(tmp_path / "model")))) == 2


def test_the_page_shows_lines_of_the_file():
    lines = {line.strip() for line in FILE.read_text().splitlines()}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "start.md").read_text(), re.DOTALL)
    assert len(blocks) > 4 and all(line.strip() in lines for block in blocks for line in block.splitlines())
