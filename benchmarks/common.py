"""What the benchmarks share: a model and prompts of known size, the machine's measured matmul rate, peak memory."""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gsm8k import train_tokenizer, write_model

# The directory that the environment variable GSM8K names has gsm8k_train.jsonl (README.md says where it comes from).
GSM8K = Path(os.environ["GSM8K"], "gsm8k_train.jsonl") if "GSM8K" in os.environ else None


def prompts(n: int) -> list[dict]:
    """The first n questions of GSM8K; synthetic ones of like length if the environment variable is not set."""
    if GSM8K:
        with open(GSM8K) as lines:
            return [json.loads(next(lines)) for _ in range(n)]
    texts = (f"Ann has {i} apples and buys {i * 7 % 50} more each day. " * 5 for i in range(n))
    return [{"question": text, "answer": "#### 1"} for text in texts]


def make_model(directory: Path, *, hidden=384, layers=6, heads=6, kv_heads=2, intermediate=1024, vocab=16384) -> int:
    """A random Qwen2-style model (default: 15.7M parameters) with a BPE tokenizer of GSM8K; its parameter count."""
    texts = (row["question"] + " " + row["answer"] for row in prompts(7000))
    tokenizer = train_tokenizer(texts, vocab, pad="<|pad|>")
    shape = {"hidden": hidden, "layers": layers, "heads": heads, "kv_heads": kv_heads, "intermediate": intermediate}
    return write_model(directory, tokenizer, vocab=vocab, longest=2048, **shape)


def stopwatch() -> tuple[object, list[float]]:
    """A callback for a trainer of transformers, and the list that it fills with the seconds of each step."""
    from transformers import TrainerCallback

    seconds: list[float] = []

    class Stopwatch(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            self.begun = time.perf_counter()

        def on_step_end(self, *args, **kwargs):
            seconds.append(time.perf_counter() - self.begun)

    return Stopwatch(), seconds


def matmul_rate(dtype, *, seconds: float = 1.0, size: int = 2048) -> float:
    """The best FLOP/s this machine reaches on a square matrix product of this dtype, with the threads now set."""
    import torch

    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        begun = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - begun)
    return 2 * size**3 / best


def peak_mib() -> float:
    """The most memory this process ever held (MiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def median(values: list[float]) -> float:
    return statistics.median(values)
