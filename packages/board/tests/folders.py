"""Run folders made by hand, with files as a run writes them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from coalign.run_files.state import StateFile

CONFIG = """\
algorithm: grpo
seed: {seed}
output: {folder}
runtime:
  steps: {steps}
reward:
- fn: math
  weight: {weight}
models:
  trainer:
    optimizer: {{lr: {lr}}}
"""


def make_run(folder: Path, *, seed: int = 0, steps: int = 20, lr: float = 1e-4, weight: float = 1.0) -> Path:
    """Make a run folder with a configuration, and a run that loaded its models."""
    folder.mkdir(parents=True)
    text = CONFIG.format(seed=seed, folder=folder, steps=steps, lr=lr, weight=weight)
    (folder / "config.yaml").write_text(text)
    (folder / ".lock").touch()
    StateFile(folder).note("running", algorithm="grpo", steps=steps)
    add_log(folder, "INFO coalign.launch.run: loading policy, trainer")
    return folder


def add_steps(folder: Path, steps: Iterable[int], last: int = 20, **metrics: Callable[[int], Any]) -> None:
    """Append these steps to metrics.jsonl, and their lines to the log. The run ends with its last one."""
    step = 0
    with open(folder / "metrics.jsonl", "a") as file:
        for step in steps:
            record = {"loss/value": 1.0 / (step + 1), "reward/mean": step / 100, "time/run": 2.0 * step}
            record |= {"tokens/trained": 100.0} | {name: make(step) for name, make in metrics.items()}
            file.write(json.dumps({"step": step, **dict(sorted(record.items()))}) + "\n")
            add_log(folder, f"INFO coalign.report.display: step {step:>2}/{last} │ reward {step / 100:.3f}")
    StateFile(folder).note("ended" if step >= last else "running", algorithm="grpo", step=step, steps=last)


def fail(folder: Path, trace: str) -> None:
    """Let the run end by an error with this traceback."""
    add_log(folder, f"ERROR coalign.launch.run: the run ended with an error\n{trace}")
    StateFile(folder).note("failed", algorithm="grpo", reason=trace.strip().splitlines()[-1])


def add_samples(folder: Path, count: int) -> None:
    """Append samples, one a step."""
    with open(folder / "samples.jsonl", "a") as file:
        for number in range(count):
            place = {"step": number + 1, "phase": "train", "group": number, "index": 0, "status": "ok", "row": {}}
            texts = {"prompt": f"What is {number} + {number}?", "response": f"It is {2 * number}."}
            rewards = {"reward": number % 2 * 1.0, "rewards": {"math": number % 2 * 1.0}, "versions": [[0, 5]]}
            file.write(json.dumps(place | texts | rewards, ensure_ascii=False) + "\n")


def add_log(folder: Path, text: str) -> None:
    with open(folder / "log.txt", "a") as file:
        file.write(f"2026-11-24 11:43:48,451 {text}\n")


def make_long_run(folder: Path, steps: int, samples: int) -> Path:
    """Make a run of many steps with 44 metrics each, and one spike in `loss/value`, in the middle."""
    make_run(folder, steps=steps)
    names = [f"{group}/{name}" for group in ("loss", "time", "goodput", "tokens") for name in "abcdefghij"]
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            values = {name: math.sin(step / 1000 + place) for place, name in enumerate(names)}
            values |= {"loss/value": 50.0 if step == steps // 2 else 1 / step, "reward/mean": step / steps}
            values |= {"time/run": 1.5 * step, "tokens/trained": 4096.0}
            file.write(json.dumps({"step": step, **values}) + "\n")
    add_log(folder, f"INFO coalign.report.display: step {steps}/{steps} │ reward 1.000")
    StateFile(folder).note("ended", algorithm="grpo", step=steps, steps=steps)
    add_samples(folder, samples)
    return folder
