"""Writes what this version makes, for every later version to read: `python -m tests.compatibility.record`.

README.md beside this file says when. Nothing that is there is written over: delete the folder of this version first.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import yaml

import coalign
from coalign.recipes import CLASSES
from coalign_prepare.run_template import RunTemplate
from tests.runs import run, stopping_after, write_data
from tests.tiny import tiny_model_dir

HERE = Path(__file__).parent
FULL = ("dpo", "grpo", "ppo", "sft")  # recipes whose settings are kept all, not only those that most people set


def build_run() -> dict[str, Any]:
    """Return the configuration of the small run, whose paths are relative to its folder."""
    return {
        "algorithm": "grpo",
        "seed": 1,
        "output": "run",
        "runtime": {
            **{"steps": 4, "prompts_per_step": 2, "samples_per_prompt": 4, "save_every": 2, "keep": 1},
            **{"threads": 1, "cluster": "local", "plots": False},
        },
        "data": {"train": "data.jsonl", "chat_template": "none"},
        "reward": {"fn": "repetition_penalty", "n": 1, "unit": "characters"},
        "models": {
            "policy": {"load": "start", "sampling": {"max_new_tokens": 4}, "max_tokens_per_micro": 256},
            "trainer": {"optimizer": {"lr": 1.0e-3}},
        },
    }


def record_yaml(folder: Path) -> None:
    """Write what `coalign init` writes: the short form of every recipe, and the full form of some."""
    for name in CLASSES:
        write(folder / "init" / f"{name}.yaml", RunTemplate(name).write())
    for name in FULL:
        write(folder / "init_full" / f"{name}.yaml", RunTemplate(name).write(full=True))


def record_run(folder: Path) -> None:
    """Train the small run to step 2 of 4 in ``folder``: what a run leaves behind that is to be continued."""
    tiny_model_dir(folder / "start", vocab=264, hidden=8, layers=1, heads=2, kv_heads=1)
    write_data(folder, "grpo").rename(folder / "data.jsonl")
    write(folder / "run.yaml", yaml.safe_dump(build_run(), sort_keys=False))
    os.chdir(folder)
    with stopping_after(2):
        run(build_run())
    for link in (".lock", "model"):  # archives of source files hold no links
        Path("run", link).unlink()


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    version = ".".join(coalign.__version__.split(".")[:2])
    target = HERE / version
    if target.exists():
        sys.exit(f"{target} is there already, and a released version's files never change")
    record_yaml(target)
    record_run(target)
