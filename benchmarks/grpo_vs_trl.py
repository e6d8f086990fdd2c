"""GRPO step: Coalign against TRL in turns, each in its own process: same model, prompts, lengths, KL and precision.

    python benchmarks/grpo_vs_trl.py [--rounds 3] [--steps 3] [--precision fp32 bf16] [--new 128] [--model NAME]
        [--trl-batch 64]

NAME is what `load:` takes: a directory, a GGUF file, a name of the hub. Its end of text is made a token that no side
samples, so that all responses have the same length. Without it a random model of 15.7M parameters is made.

Prints medians and ratios, split by phase, with the FLOP floor: the least work the step needs (generation with the
prompt computed once per group, reference forward, forward and backward; head only where a token is chosen) over the
matmul rate measured in the same run. TRL runs without gradient checkpointing, its fastest setting here, and with
`--trl-batch` samples in a micro-batch: all of a step (64) is its fastest, fewer take less memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import make_model, matmul_rate, median, peak_mib, prompts, stopwatch

PROMPTS, SAMPLES, KL = 8, 8, 0.04


def reward_length(sample) -> float:
    """A reward that costs nothing and differs between samples."""
    return float(sum(sample.tokens.tolist()) % 97) / 97


def run_coalign(model: Path, precision: str, steps: int, new: int) -> dict:
    from coalign import load_config
    from coalign.launch.run import train
    from coalign.report.display import Display

    work = Path(tempfile.mkdtemp())
    data = work / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in prompts(PROMPTS * (steps + 1))))
    config = work / "run.yaml"
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[precision]
    config.write_text(
        json.dumps(
            {
                "algorithm": "grpo",
                "output": str(work / "run"),
                "runtime": {
                    "cluster": "local",
                    "steps": steps + 1,
                    "prompts_per_step": PROMPTS,
                    "samples_per_prompt": SAMPLES,
                    "log_samples": 0,
                    "trackers": [],
                    "resume": "never",
                },
                "data": {"train": str(data), "prompt_key": "question", "shuffle": False},
                "reward": {"fn": "grpo_vs_trl:reward_length"},
                "loss": {"fn": "policy_gradient", "kl_coef": KL},
                "models": {
                    "policy": {
                        "load": str(model),
                        "compute_dtype": dtype,
                        "sampling": {"max_new_tokens": new},
                    },
                    "trainer": {"optimizer": {"lr": 1e-6}, "max_tokens_per_micro": 16384},
                },
            }
        )
    )
    train(load_config(config), Display(quiet=True))
    lines = [json.loads(line) for line in (work / "run" / "metrics.jsonl").read_bytes().splitlines()]
    timed = [line for line in lines if line["step"] > 1]
    pick = lambda key: [line[key] for line in timed]  # noqa: E731
    models = ("policy.generate", "reference.forward_step", "trainer.train_step")
    return {
        "step": pick("time/step"),
        "generate": pick("time/policy.generate"),
        "score": pick("time/reference.forward_step"),
        "train": pick("time/trainer.train_step"),
        "overhead": [line["time/step"] - sum(line[f"time/{m}"] for m in models) for line in timed],
        "tokens": [line["tokens/generated"] for line in timed],
        "prompt": [line["tokens/prompt"] for line in timed],
        "peak": peak_mib(),
    }


def run_trl(model: Path, precision: str, steps: int, new: int, batch: int) -> dict:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    times = defaultdict(list)
    inside: list[str] = []

    class Timed(GRPOTrainer):
        """TRL's trainer with a stopwatch at the borders of its phases."""

        def _generate(self, *args, **kwargs):
            return self._clock("generate", super()._generate, *args, **kwargs)

        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            call = super()._get_per_token_logps_and_entropies
            return self._clock("score", call, *args, **kwargs) if "prepare" in inside else call(*args, **kwargs)

        def _generate_and_score_completions(self, *args, **kwargs):
            return self._clock("prepare", super()._generate_and_score_completions, *args, **kwargs)

        def training_step(self, *args, **kwargs):
            return self._clock("training_step", super().training_step, *args, **kwargs)

        def _clock(self, name, call, *args, **kwargs):
            inside.append(name)
            begun = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                times[name].append(time.perf_counter() - begun)
                inside.pop()

    work = tempfile.mkdtemp()
    rows = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": r["question"]}]} for r in prompts(PROMPTS * (steps + 1))]
    )
    arguments = GRPOConfig(
        output_dir=work,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=PROMPTS * SAMPLES // batch,
        num_generations=SAMPLES,
        max_completion_length=new,
        generation_kwargs={"min_new_tokens": new},
        beta=KL,
        learning_rate=1e-6,
        max_steps=steps + 1,
        gradient_checkpointing=False,
        bf16=precision == "bf16",
        use_cpu=True,
        logging_steps=10**6,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        shuffle_dataset=False,
        model_init_kwargs=None,
    )
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    tokens: list[int] = []

    def reward(completion_ids, **_):
        tokens.append(sum(len(ids) for ids in completion_ids))
        return [float(sum(ids) % 97) / 97 for ids in completion_ids]

    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=dtype),
        reward_funcs=reward,
        args=arguments,
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(model),
    )

    clock, seconds = stopwatch()
    trainer.add_callback(clock)
    trainer.train()
    whole = seconds[1:]
    generate, score, prepare = (times[k][1:] for k in ("generate", "score", "prepare"))
    return {
        "step": whole,
        "generate": generate,
        "score": score,
        "train": [w - p for w, p in zip(whole, prepare, strict=True)],
        "overhead": [p - g - s for p, g, s in zip(prepare, generate, score, strict=True)],
        "tokens": tokens[1:],
        "peak": peak_mib(),
    }


def floor_flops(parameters: int, embedding: int, tokens: float, prompt: float) -> dict[str, float]:
    """FLOPs of one step: 2 per parameter and token forward, 4 backward; head only for chosen tokens."""
    body, head = 2 * (parameters - embedding), 2 * embedding
    groups = PROMPTS * prompt
    generate = body * (groups + tokens) + head * tokens
    return {"generate": generate, "score": generate, "train": 3 * generate, "step": 5 * generate}


def copy_endless(name: str, directory: Path) -> None:
    """Copy the model ``name`` to ``directory``, with the last token of its vocabulary as its end of text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from coalign.hub import fetch

    source = fetch(name)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    last = len(tokenizer) - 1
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(last)
    model.config.eos_token_id = model.generation_config.eos_token_id = last
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def count_parameters(directory: Path) -> tuple[int, int]:
    """Parameters of a model, and those of its head."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    return model.num_parameters(), model.get_output_embeddings().weight.numel()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--steps", type=int, default=3)
    options.add_argument("--precision", nargs="+", default=["fp32", "bf16"])
    options.add_argument("--new", type=int, default=128, help="tokens of a response")
    options.add_argument("--trl-batch", type=int, default=PROMPTS * SAMPLES, help="samples in a micro-batch of TRL's")
    options.add_argument("--worker", choices=["coalign", "trl"], help=argparse.SUPPRESS)
    options.add_argument("--model", help="a directory, a GGUF file, or a name of the hub")
    options.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.worker:
        work = Path(given.model), given.precision[0], given.steps, given.new
        result = run_coalign(*work) if given.worker == "coalign" else run_trl(*work, given.trl_batch)
        given.result.write_text(json.dumps(result))
        return

    import torch

    from coalign.backends.engines.native.kernels import choose_compute_dtype

    with tempfile.TemporaryDirectory() as work:
        model = Path(work) / "model"
        if given.model:
            copy_endless(given.model, model)
        else:
            make_model(model)
        parameters, embedding = count_parameters(model)
        results = defaultdict(lambda: defaultdict(list))
        for _ in range(given.rounds):
            for precision in given.precision:
                for worker in ("coalign", "trl"):
                    file = Path(work) / "result.json"
                    command = [sys.executable, __file__, "--worker", worker, "--precision", precision]
                    command += [
                        "--steps",
                        str(given.steps),
                        "--new",
                        str(given.new),
                        "--trl-batch",
                        str(given.trl_batch),
                        "--model",
                        str(model),
                        "--result",
                        str(file),
                    ]
                    subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
                    measured = json.loads(file.read_text())
                    for key, value in measured.items():
                        results[precision, worker][key] += value if isinstance(value, list) else [value]
                    steps = ", ".join(f"{seconds:.2f}" for seconds in measured["step"])
                    print(f"{worker} {precision}: steps of {steps} s, peak {measured['peak']:.0f} MiB", flush=True)
        print(
            f"model: {parameters / 1e6:.1f}M parameters; "
            f"{PROMPTS} prompts x {SAMPLES} samples x {given.new} tokens; KL {KL}"
        )
        for precision in given.precision:
            ours, theirs = results[precision, "coalign"], results[precision, "trl"]
            dtype = torch.float32 if precision == "fp32" else torch.bfloat16
            rate = matmul_rate(choose_compute_dtype(dtype, torch.device("cpu")))
            floors = floor_flops(parameters, embedding, median(ours["tokens"]), median(ours["prompt"]))
            print(f"\n{precision}: matmul {rate / 1e9:.0f} GFLOP/s   (median of {len(ours['step'])} steps)")
            print(f"{'phase':<10}{'Coalign s':>11}{'TRL s':>9}{'ratio':>8}{'floor s':>9}{'of floor':>10}")
            for phase in ("generate", "score", "train", "step"):
                a, b, least = median(ours[phase]), median(theirs[phase]), floors[phase] / rate
                print(f"{phase:<10}{a:>11.2f}{b:>9.2f}{a / b:>8.2f}{least:>9.2f}{least / a:>10.0%}")
            print(f"{'overhead':<10}{median(ours['overhead']):>11.3f}{median(theirs['overhead']):>9.3f}")
            mine, other = max(ours["peak"]), max(theirs["peak"])
            print(f"{'peak MiB':<10}{mine:>11.0f}{other:>9.0f}{mine / other:>8.2f}")


if __name__ == "__main__":
    main()
