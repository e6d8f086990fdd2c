"""The curves of the stages that have run in one picture.

python -m examples.smollm2.plots stages.png                       # of runs/smollm2, or of RUNS
python -m examples.smollm2.plots beside_trl.png runs/curves       # of benchmarks/curves_vs_trl.py's folder
"""

from __future__ import annotations

import json
import os
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

from coalign.report.plots import open_figure, pick_colors, save_figure, style_axes
from coalign.run_files.records import read_records

# Title and unit of each panel, its run, and its curves: label, metric, steps of a running mean.
PANELS = (
    ("SFT: loss", "nats per token", "sft", (("training", "loss/nll", 5), ("test questions", "eval/loss/nll", 1))),
    (
        "Reward model: right solution scores higher",
        "share of pairs",
        "reward_model",
        (("training", "loss/accuracy", 5), ("held-out questions", "eval/loss/accuracy", 1)),
    ),
    (
        "DPO: right solution gains more",
        "share of pairs",
        "dpo",
        (("training", "loss/accuracy", 5), ("held-out questions", "eval/loss/accuracy", 1)),
    ),
    ("GRPO: right answers of all drawn", "share", "grpo", (("training", "rollout/reward", 5),)),
)
SIDES = {"coalign": "Coalign", "trl": "TRL 1.16"}


def draw_stages(folder: Path, file: Path) -> None:
    present = [panel for panel in PANELS if (folder / panel[2] / "metrics.jsonl").exists()]
    figure = open_figure(4.5 * len(present), 3.2, layout="constrained")
    panels = figure.subplots(1, len(present), squeeze=False)[0]
    for axes, (title, unit, run, curves) in zip(panels, present, strict=True):
        rows = list(read_records(folder / run / "metrics.jsonl"))
        for color, (label, metric, mean) in zip(pick_colors(2), curves, strict=False):
            found = [(row["step"], row[metric]) for row in rows if metric in row]
            _draw_curve(axes, found, color, label, mean)
        style_axes(axes, title, unit, size=10).legend(fontsize=8, frameon=False)
    save_figure(figure, file)


def draw_sides(folder: Path, file: Path) -> None:
    """Draw loss of SFT and reward of GRPO, as far as they are there, of Coalign and TRL."""
    stages = {"sft": ("SFT: loss", "nats per token", 1), "grpo": ("GRPO: reward", "share of instructions followed", 5)}
    present = [stage for stage in stages if (folder / f"{stage}_trl.jsonl").exists()]
    figure = open_figure(4.5 * len(present), 3.2, layout="constrained")
    for axes, stage in zip(figure.subplots(1, len(present), squeeze=False)[0], present, strict=True):
        title, unit, mean = stages[stage]
        for color, (side, label) in zip(pick_colors(2), SIDES.items(), strict=True):
            values = [json.loads(line)["value"] for line in (folder / f"{stage}_{side}.jsonl").open()]
            _draw_curve(axes, list(enumerate(values, 1)), color, label, mean)
        style_axes(axes, title, unit, size=10).legend(fontsize=8, frameon=False)
    save_figure(figure, file)


def _draw_curve(axes: Any, points: list[tuple[int, float]], color: str, label: str, mean: int) -> None:
    """Draw the points, and with ``mean`` over 1 their running mean over so many steps in the place of a line."""
    steps, values = [step for step, _ in points], [value for _, value in points]
    if mean > 1:
        axes.plot(steps, values, ".", color=color, alpha=0.35, markersize=4)
        sums = [0.0, *accumulate(values)]
        values = [(sums[i + 1] - sums[max(0, i + 1 - mean)]) / min(i + 1, mean) for i in range(len(values))]
        label += f" (mean of {mean} steps)"
    axes.plot(steps, values, color=color, label=label, marker="o" if len(steps) < 6 else "")


if __name__ == "__main__":
    match sys.argv[1:]:
        case [picture]:
            draw_stages(Path(os.environ.get("RUNS", "runs/smollm2")), Path(picture))
        case [picture, curves]:
            draw_sides(Path(curves), Path(picture))
        case _:
            sys.exit(__doc__)
