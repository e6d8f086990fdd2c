"""Learning curves: Coalign and TRL train one model on the same rows in the same order, each in its own process.

    python benchmarks/curves_vs_trl.py sft --model MODEL --data runs/smollm2/data/train.jsonl --steps 100
    python benchmarks/curves_vs_trl.py grpo --model MODEL --data runs/demo/data/train.jsonl --steps 20

SFT: 16 questions and solutions a step, AdamW at 1e-4, mean over the trained tokens. GRPO: instructions of the demo, 8
prompts x 8 samples x 32 tokens, KL 0.01, AdamW at 1e-5, 1 for a sentence that follows its instruction. Weights in
float32, computed in bf16 (`--dtype float32`: not), no warmup, constant learning rate. Each side draws its own samples,
so curves of GRPO agree within noise only; losses of SFT agree step by step. Writes a line per step to
OUTPUT/{stage}_{side}.jsonl while it runs (a side with all its steps is not run again), then prints both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import peak_mib, stopwatch

import coalign
from examples.instructions import follows

ROWS = {"sft": 16, "grpo": 8}
RATES = {"sft": 1e-4, "grpo": 1e-5}
SAMPLES, NEW, KL = 8, 32, 0.01
FORMAT = "{question}\nEnd with #### and the answer."
SHOWN = {"sft": "loss", "grpo": "reward"}


def run_coalign(stage: str, model: Path, data: Path, steps: int, file: Path, dtype: str, seed: int) -> None:
    computed = {"compute_dtype": dtype}
    models: dict[str, Any] = {"trainer": {"load": str(model), "optimizer": {"lr": RATES[stage]}} | computed}
    models["trainer"]["optimizer"]["schedule"] = "constant"
    config: dict[str, Any] = {
        "algorithm": stage,
        "seed": seed,
        "output": str(file.with_suffix("")),
        "runtime": {"steps": steps, "prompts_per_step": ROWS[stage], "trackers": [], "resume": "never", "plots": False},
        "data": {"train": str(data), "shuffle": False},
        "models": models,
    }
    if stage == "grpo":
        models["policy"] = {"load": str(model), "sampling": {"max_new_tokens": NEW}} | computed
        config["runtime"]["samples_per_prompt"] = SAMPLES
        config["loss"] = {"fn": "policy_gradient", "kl_coef": KL}
        result = coalign.train(config, reward=follows, quiet=True)
    else:
        config["data"] |= {"prompt_key": "question", "prompt_format": FORMAT.replace("question", "prompt")}
        result = coalign.train(config, quiet=True)
    for line in result.metrics:
        length = line["tokens/generated"] / (ROWS[stage] * SAMPLES) if stage == "grpo" else None
        value = line["loss/value" if stage == "sft" else "reward/mean"]
        append(file, value, line["loss/grad_norm"], line["time/step"], length)


def run_trl(stage: str, model: Path, data: Path, steps: int, file: Path, dtype: str, seed: int) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

    clock, seconds = stopwatch()

    class Log(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if name := next((n for n in ("reward", "loss") if logs and n in logs), None):
                append(file, logs[name], logs["grad_norm"], seconds[-1], logs.get("completions/mean_length"))

    lines = data.read_bytes().splitlines()[: ROWS[stage] * steps]
    rows = []
    for row in map(json.loads, lines):
        if stage == "sft":
            asked, answer = FORMAT.format(**row), row["answer"]
            rows.append({"prompt": said("user", asked), "completion": said("assistant", answer)})
        else:
            rows.append(row | {"prompt": said("user", row["prompt"])})
    same: dict[str, Any] = {
        "output_dir": str(file.with_suffix("")),
        "seed": seed,
        "learning_rate": RATES[stage],
        "lr_scheduler_type": "constant",
        "max_steps": steps,
        "gradient_checkpointing": False,
        "bf16": dtype == "bfloat16",
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    tokenizer = AutoTokenizer.from_pretrained(model)
    common: dict[str, Any] = {
        "model": AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        "train_dataset": Dataset.from_list(rows),
        "processing_class": tokenizer,
        "callbacks": [clock, Log()],
    }
    if stage == "sft":
        arguments = SFTConfig(
            per_device_train_batch_size=4,  # of 16, logits take 13 GiB
            gradient_accumulation_steps=ROWS[stage] // 4,
            train_sampling_strategy="sequential",
            max_length=None,
            **same,
        )
        SFTTrainer(args=arguments, **common).train()
        return
    arguments = GRPOConfig(
        per_device_train_batch_size=SAMPLES,  # logits of more samples do not fit into 24 GiB
        gradient_accumulation_steps=ROWS[stage],
        num_generations=SAMPLES,
        max_completion_length=NEW,
        beta=KL,
        shuffle_dataset=False,
        **same,
    )

    def grade(completions, data_source, topic, word, **_):
        none, rewards = torch.zeros(0), []
        for said, kind, named, used in zip(completions, data_source, topic, word, strict=True):
            meta = {"data_source": kind, "topic": named, "word": used}
            sample = coalign.Sample(0, 0, none, none, none, response=said[0]["content"], meta=meta)
            rewards.append(follows(sample))
        return rewards

    GRPOTrainer(args=arguments, reward_funcs=grade, **common).train()


def said(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


def append(file: Path, value: float, norm: float, seconds: float, tokens: float | None) -> None:
    line = {
        "value": value,
        "grad_norm": norm,
        "seconds": seconds,
        "tokens": tokens,
        "peak": peak_mib(),
    }
    with file.open("a") as lines:
        lines.write(json.dumps(line) + "\n")


def read(file: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in file.read_bytes().splitlines()] if file.exists() else []


def show(stage: str, steps: int, sides: dict[str, list[dict[str, float]]]) -> None:
    print(f"{stage}: {SHOWN[stage]}, gradient's norm" + (", tokens of a response" if stage == "grpo" else ""))
    for i in range(0, steps, max(1, steps // 20)):
        cells = []
        for side, lines in sides.items():
            line = lines[i]
            length = f" {line['tokens']:6.1f}" if line["tokens"] else ""
            cells.append(f"{side} {line['value']:.4f} {line['grad_norm']:.3f}{length}")
        print(f"step {i + 1:>3}   " + "   ".join(cells))
    for side, lines in sides.items():
        values = [line["value"] for line in lines]
        error = statistics.stdev(values) / len(values) ** 0.5
        print(
            f"{side}: mean {statistics.mean(values):.4f} ± {error:.4f} (standard error), last quarter "
            f"{statistics.mean(values[-len(values) // 4 :]):.4f}; median step "
            f"{statistics.median(line['seconds'] for line in lines[1:]):.2f} s; peak {lines[-1]['peak']:.0f} MiB"
        )


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("stage", choices=list(ROWS))
    options.add_argument("--model", required=True, help="a directory, a GGUF file, or a name of the hub")
    options.add_argument("--data", type=Path, required=True, help="JSONL: questions and answers, or the demo's rows")
    options.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--seed", type=int, default=0, help="of the samples")
    options.add_argument("--output", type=Path, default=Path("runs/curves"))
    options.add_argument("--only", choices=["coalign", "trl"], help="run this side alone, in this process")
    given = options.parse_args()
    from coalign.hub import fetch

    given.output.mkdir(parents=True, exist_ok=True)
    files = {side: given.output / f"{given.stage}_{side}.jsonl" for side in ("coalign", "trl")}
    if given.only:
        run = {"coalign": run_coalign, "trl": run_trl}[given.only]
        run(given.stage, fetch(given.model), given.data, given.steps, files[given.only], given.dtype, given.seed)
        return
    for side, file in files.items():
        if len(read(file)) != given.steps:
            file.unlink(missing_ok=True)
            subprocess.run([sys.executable, *sys.argv, "--only", side], check=True)
    show(given.stage, given.steps, {side: read(file) for side, file in files.items()})


if __name__ == "__main__":
    main()
