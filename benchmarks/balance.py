"""How unequal the ranks of a step are: neighbours of equal tokens (``shard_rows`` by order) against equal cost.

Prints, for the dearest rank over the mean, tokens and attention (squares of lengths), and micro-batches per rank: one
after the other, filled until the next group is too much, against best fit. Lengths only, no model:
``python benchmarks/balance.py GSM8K.jsonl``.
"""

from __future__ import annotations

import json
import random
import sys
from statistics import mean

import torch

from coalign.cluster.batch_ref import BatchRef, Meta
from coalign.cluster.batch_shards import shard_rows
from coalign.cluster.local import LocalStore
from coalign.data.batch import Batch

STEPS, PROMPTS, SAMPLES = 20, 64, 8


def gsm8k(path: str, draw: random.Random) -> list[int]:
    """A step: of each problem eight answers that are 0.5 to 2 times as long as the solution (a token: four letters)."""
    with open(path) as file:
        rows = [json.loads(line) for line in file]
    step = []
    for row in draw.sample(rows, PROMPTS):
        step += [
            int(len(row["question"]) / 4 + len(row["answer"]) / 4 * 2 ** draw.uniform(-1, 1)) for _ in range(SAMPLES)
        ]
    return step


def heavy_tailed(draw: random.Random) -> list[int]:
    """A step of a reasoning model: the medians of prompts and the samples around them are log-normal, up to 32k."""
    medians = [draw.lognormvariate(7.5, 0.8) for _ in range(PROMPTS)]
    return [int(min(200 + m * draw.lognormvariate(0, 0.6), 32768)) for m in medians for _ in range(SAMPLES)]


def one_after_the_other(share: Batch, room: int) -> int:
    """Micro-batches of whole groups, none taken up again."""
    groups = torch.zeros(PROMPTS, dtype=torch.int64).index_add_(0, share["group"], share.lengths)
    count, held = 0, room
    for size in groups[groups > 0].tolist():
        count, held = (count, held + size) if held + size <= room else (count + max(1, -(-size // room)), size % room)
    return count


def measure(lengths: list[int], ranks: int, by: str, room: int) -> tuple[float, float, float]:
    group = torch.arange(PROMPTS).repeat_interleave(SAMPLES)
    batch = Batch(torch.tensor(lengths)).with_(tokens=torch.zeros(sum(lengths), dtype=torch.int32), group=group)
    store = LocalStore()
    parts = shard_rows(BatchRef.of(Meta.of(batch), store.put(batch), store), ranks, by).batches
    tokens = [float(part.tokens_total) for part in parts]
    attention = [float(part.lengths.double().square().sum()) for part in parts]
    shares = [part.fetch() for part in parts]
    if by == "order":
        micros = [one_after_the_other(share, room) for share in shares]
    else:
        micros = [len(share.micro(room, keep="group")) for share in shares]
    return max(tokens) / mean(tokens), max(attention) / mean(attention), float(max(micros))


def main(path: str) -> None:
    kinds = {"GSM8K-like": (lambda draw: gsm8k(path, draw), 4096), "heavy-tailed": (heavy_tailed, 32768)}
    print("| lengths | ranks | | tokens | attention | micro-batches |\n|---|---|---|---|---|---|")
    for (kind, (make, room)), ranks in ((item, ranks) for item in kinds.items() for ranks in (2, 8, 16)):
        draw = random.Random(0)
        steps = [make(draw) for _ in range(STEPS)]
        for by, name in (("order", "neighbours"), ("cost", "Karmarkar-Karp")):
            found = [measure(step, ranks, by, room) for step in steps]
            tokens, attention, micros = (mean(column) for column in zip(*found, strict=True))
            print(f"| {kind} | {ranks} | {name} | {tokens:.3f} | {attention:.3f} | {micros:.1f} |")


if __name__ == "__main__":
    main(sys.argv[1])
