"""DPO and SFT: Coalign against TRL in turns, each in its own process: same model, rows, batch size, lengths, precision.

    python benchmarks/offline_vs_trl.py [--algorithms dpo sft] [--rounds 3] [--steps 4] [--precision fp32 bf16]

Prints medians of the step's time, and tokens/s with the same count for both: the tokens of every sequence, prompt and
response, no padding. The floor counts what has to be computed: a comparison's prompt once, the head only for trained
tokens; 2 FLOPs per parameter and token forward, 4 backward, over the matmul rate measured in the same run. TRL computes
its reference on the fly as Coalign does, without gradient checkpointing (its fastest setting here).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import make_model, matmul_rate, median, peak_mib, stopwatch
from gsm8k import pairs, read

ROWS = {"dpo": 16, "sft": 32}  # of one step
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def rows(algorithm: str, steps: int) -> list[dict]:
    """The first rows that ``steps`` steps need."""
    if algorithm == "dpo":
        found = pairs(read("gsm8k_model_solutions.jsonl"))
    else:
        found = ({"prompt": r["question"], "answer": r["answer"]} for r in read("gsm8k_train.jsonl"))
    return [row for _, row in zip(range(ROWS[algorithm] * steps), found, strict=False)]


def run_coalign(algorithm: str, model: Path, precision: str, steps: int) -> dict:
    from coalign import load_config
    from coalign.launch.run import train
    from coalign.report.display import Display

    work = Path(tempfile.mkdtemp())
    data = work / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows(algorithm, steps + 1)))
    trainer = {"load": str(model), "compute_dtype": DTYPES[precision], "optimizer": {"lr": 1e-6}}
    config = {
        "algorithm": algorithm,
        "output": str(work / "run"),
        "runtime": {
            "cluster": "local",
            "steps": steps + 1,
            "prompts_per_step": ROWS[algorithm],
            "log_samples": 0,
            "trackers": [],
            "resume": "never",
        },
        "data": {"train": str(data), "shuffle": False},
        "models": {"trainer": trainer},
    }
    train(load_config(config), Display(quiet=True))
    lines = [json.loads(line) for line in (work / "run" / "metrics.jsonl").read_bytes().splitlines()]
    return {"step": [line["time/step"] for line in lines if line["step"] > 1], "peak": peak_mib()}


def run_trl(algorithm: str, model: Path, precision: str, steps: int) -> dict:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    say = lambda role, text: [{"role": role, "content": text}]  # noqa: E731
    examples = [
        {"prompt": say("user", row["prompt"])}
        | {key: say("assistant", row[key]) for key in ("chosen", "rejected") if key in row}
        | ({"completion": say("assistant", row["answer"])} if "answer" in row else {})
        for row in rows(algorithm, steps + 1)
    ]
    config, trainer_class = {"dpo": (DPOConfig, DPOTrainer), "sft": (SFTConfig, SFTTrainer)}[algorithm]
    arguments = config(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=ROWS[algorithm],
        learning_rate=1e-6,
        max_steps=steps + 1,
        gradient_checkpointing=False,
        bf16=precision == "bf16",
        use_cpu=True,
        logging_steps=10**6,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    clock, seconds = stopwatch()
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=dtype),
        args=arguments,
        train_dataset=Dataset.from_list(examples),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[clock],
    )
    trainer.train()
    return {"step": seconds[1:], "peak": peak_mib()}


def counts(algorithm: str, model: Path, steps: int) -> dict[str, float]:
    """Tokens of an average step: all of them; those to compute once a comparison's prompt is shared; trained ones."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    found = defaultdict(float)
    for row in rows(algorithm, steps + 1)[ROWS[algorithm] :]:
        messages = [{"role": "user", "content": row["prompt"]}]
        prompt = len(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)["input_ids"])
        answers = [row[key] for key in ("chosen", "rejected", "answer") if key in row]
        trained = sum(len(tokenizer(text)["input_ids"]) + 1 for text in answers)
        found["all"] += trained + prompt * len(answers)
        found["computed"] += trained + prompt
        found["trained"] += trained
    return {name: value / steps for name, value in found.items()}


def floor_flops(algorithm: str, parameters: int, embedding: int, tokens: dict[str, float]) -> float:
    """FLOPs of one step, with the reference's forward pass for DPO."""
    forward = 2 * (parameters - embedding) * tokens["computed"] + 2 * embedding * tokens["trained"]
    return forward * (4 if algorithm == "dpo" else 3)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--algorithms", nargs="+", choices=list(ROWS), default=list(ROWS))
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--steps", type=int, default=4)
    options.add_argument("--precision", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    options.add_argument("--worker", choices=["coalign", "trl"], help=argparse.SUPPRESS)
    options.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.worker:
        run = {"coalign": run_coalign, "trl": run_trl}[given.worker]
        given.result.write_text(json.dumps(run(given.algorithms[0], given.model, given.precision[0], given.steps)))
        return

    import torch

    with tempfile.TemporaryDirectory() as work:
        model = Path(work) / "model"
        parameters = make_model(model)
        embedding = 16384 * 384
        for algorithm in given.algorithms:
            tokens = counts(algorithm, model, given.steps)
            results = defaultdict(lambda: defaultdict(list))
            for _ in range(given.rounds):
                for precision in given.precision:
                    for worker in ("coalign", "trl"):
                        file = Path(work) / "result.json"
                        command = [sys.executable, __file__, "--worker", worker, "--algorithms", algorithm]
                        command += ["--precision", precision, "--steps", str(given.steps)]
                        command += ["--model", str(model), "--result", str(file)]
                        subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
                        for key, value in json.loads(file.read_text()).items():
                            results[precision, worker][key] += value if isinstance(value, list) else [value]
            print(
                f"\n{algorithm}: {parameters / 1e6:.1f}M parameters, {ROWS[algorithm]} rows a step, "
                f"{tokens['all']:.0f} tokens ({tokens['computed']:.0f} to compute, {tokens['trained']:.0f} trained)"
            )
            head = ("", "Coalign s", "TRL s", "tokens/s", "TRL", "ratio", "floor s", "of floor", "MiB", "TRL")
            print("{:<6}{:>11}{:>9}{:>10}{:>8}{:>8}{:>9}{:>10}{:>7}{:>7}".format(*head))
            for precision in given.precision:
                ours, theirs = results[precision, "coalign"], results[precision, "trl"]
                a, b = median(ours["step"]), median(theirs["step"])
                rate = matmul_rate(getattr(torch, DTYPES[precision]))
                least = floor_flops(algorithm, parameters, embedding, tokens) / rate
                print(
                    f"{precision:<6}{a:>11.2f}{b:>9.2f}{tokens['all'] / a:>10.0f}{tokens['all'] / b:>8.0f}"
                    f"{b / a:>8.2f}{least:>9.2f}{least / a:>10.0%}{max(ours['peak']):>7.0f}{max(theirs['peak']):>7.0f}"
                )


if __name__ == "__main__":
    main()
