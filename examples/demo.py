"""`make demo`: a small model learns sums from examples, then from nothing but a reward. Minutes on a CPU."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

from arithmetic import make_data, make_model

from coalign import load_config
from coalign.launch.run import train
from coalign.report.display import Display

HERE = Path(__file__).parent
SHOWN = 3


def run(name: str, display: Display) -> Path:
    """Train what examples/<name>.yaml says; its run folder."""
    config = load_config(HERE / f"{name}.yaml")
    train(config, display)
    return Path(config.output)


def samples(folder: Path, step: int) -> list[dict]:
    """Evaluation samples that the run wrote at a step."""
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_bytes().splitlines()]
    return [line for line in lines if line["phase"] == "eval" and line["step"] == step][:SHOWN]


def main() -> None:
    folder = Path(os.environ.setdefault("DEMO", "runs/demo"))
    shutil.rmtree(folder, ignore_errors=True)
    display = Display()
    begun = time.perf_counter()
    make_model(folder / "model")
    make_data(folder / "data")
    display.show("1/2  supervised fine-tuning on sums, stopped early")
    run("arithmetic_sft", display)
    display.show("2/2  GRPO: the reward is 1 for a right answer")
    grpo = run("arithmetic_grpo", display)

    steps = [json.loads(line) for line in (grpo / "metrics.jsonl").read_bytes().splitlines()]
    accuracy = [(line["step"], line["eval/mean@1"]) for line in steps if "eval/mean@1" in line]
    (_, before), (last, after) = accuracy[0], accuracy[-1]
    for title, step in (("before GRPO", 0), ("after GRPO", last)):
        for sample in samples(grpo, step):
            mark = "right" if sample["reward"] == 1 else "wrong"
            display.show(f"{title}:  {sample['prompt']}{sample['response'].removesuffix('<end>')}   ({mark})")
    held_out = len((folder / "data" / "eval.jsonl").read_bytes().splitlines())
    display.show(f"{time.perf_counter() - begun:.0f} s; curves: {grpo / 'plots'}")
    display.show(f"accuracy: {before:.1%} -> {after:.1%} on {held_out} held-out problems")


if __name__ == "__main__":
    main()
