"""Predicted against measured on this machine: the steps of the GRPO, SFT and DPO benchmarks.

    python benchmarks/plan_here.py [--precision fp32 bf16] [--steps 3] [--keep] [--only grpo sft dpo]

Measures the machine first, as `coalign plan --measure` does (``--keep`` takes the file of the last time), then runs
each benchmark's Coalign side in a process of its own and prints both. Needs an idle machine, and the files of GSM8K
(examples/gsm8k.py).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent))
import grpo_vs_trl
import offline_vs_trl
from common import make_model

from coalign_plan.constants import MeasuredMachine, load_machine
from coalign_plan.gpus import ClusterSpec
from coalign_plan.hf_config import read_directory
from coalign_plan.job import JobShape, LengthDistribution, ModelWork, Parallelism
from coalign_plan.model_size import ModelSize
from coalign_plan.prediction import StepPrediction, predict_step
from coalign_plan.report.probe import FOLDER, measure_machine, name_machine

NEW = 128  # tokens of a response of GRPO
GOAL = 0.2


def describe_works(size: ModelSize, precision: str, names: tuple[str, ...]) -> tuple[ModelWork, ...]:
    """Return the models of a step; all are on the one device of this machine."""
    width = {"fp32": 4.0, "bf16": 2.0}[precision]
    roles: dict[str, Literal["rollout", "scorer", "trainer"]] = {
        "policy": "rollout", "reference": "scorer", "trainer": "trainer"
    }  # fmt: skip
    return tuple(
        ModelWork(
            name, roles[name], size, Parallelism(), precision=precision, weight_bytes=width, kv_bytes=width,
            micro_batch_tokens=16384, recomputes_head=True,
        )
        for name in names
    )  # fmt: skip


def describe_grpo(size: ModelSize, precision: str, prompt: float) -> JobShape:
    works = describe_works(size, precision, ("policy", "reference", "trainer"))
    return JobShape(
        works, grpo_vs_trl.PROMPTS, grpo_vs_trl.SAMPLES, prompt, LengthDistribution(NEW, NEW), shares_prompts=True
    )


def describe_offline(algorithm: str, size: ModelSize, precision: str, tokens: dict[str, float]) -> JobShape:
    rows = offline_vs_trl.ROWS[algorithm]
    samples = {"sft": 1, "dpo": 2}[algorithm]
    works = describe_works(size, precision, ("trainer",) if algorithm == "sft" else ("reference", "trainer"))
    answer = tokens["trained"] / rows / samples
    prompt = (tokens["computed"] - tokens["trained"]) / rows
    return JobShape(works, rows, samples, prompt, LengthDistribution(answer, 3 * answer), shares_prompts=True)


def run_worker(script: str, algorithm: str | None, model: Path, precision: str, steps: int) -> dict:
    """Run the Coalign side of a benchmark in a process of its own, as the benchmark does."""
    result = model.parent / "result.json"
    command = [sys.executable, str(Path(__file__).with_name(script)), "--worker", "coalign", "--precision", precision]
    command += ["--steps", str(steps), "--model", str(model), "--result", str(result)]
    command += ["--algorithms", algorithm] if algorithm else ["--new", str(NEW)]
    subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    return json.loads(result.read_text(encoding="utf-8"))


def show(name: str, predicted: StepPrediction, measured: dict) -> bool:
    """Print a step and its phases; return whether the step is within the goal."""
    phases = predicted.phase_seconds() | {"step": predicted.seconds}
    for phase in ("generate", "score", "train", "step"):
        if phase in measured and phase in phases:
            seconds = statistics.median(measured[phase])
            print(f"{name:12}{phase:10}{phases[phase]:10.2f} s predicted{seconds:10.2f} s measured{phases[phase] / seconds - 1:+8.0%}")  # fmt: skip  # noqa: E501
    return abs(predicted.seconds / statistics.median(measured["step"]) - 1) <= GOAL


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--only", nargs="+", choices=["grpo", "sft", "dpo"], default=["grpo", "sft", "dpo"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--keep", action="store_true", help="take the constants that were measured last time")
    args = parser.parse_args()
    path = FOLDER / f"{name_machine()}.json"
    machine: MeasuredMachine = load_machine(path) if args.keep else measure_machine()[0]
    cluster = ClusterSpec(1, 1, machine.gpu, machine.gpu.network_gb_s)
    right = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_model(model)
        size = read_directory(model)
        for precision in args.precision:
            for name in args.only:
                if name == "grpo":
                    measured = run_worker("grpo_vs_trl.py", None, model, precision, args.steps)
                    prompt = statistics.mean(measured["prompt"])
                    job = describe_grpo(size, precision, prompt)
                else:
                    measured = run_worker("offline_vs_trl.py", name, model, precision, args.steps)
                    job = describe_offline(name, size, precision, offline_vs_trl.counts(name, model, args.steps))
                right.append(show(f"{name} {precision}", predict_step(job, cluster, machine.constants), measured))
    print(f"{sum(right)} of {len(right)} steps within {GOAL:.0%}")


if __name__ == "__main__":
    main()
