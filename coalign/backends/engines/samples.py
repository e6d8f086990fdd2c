"""What a policy generates, as a Batch: samples that have begun, and what is added to them.

A sample whose status is PARTIAL goes on after the tokens that it has; any other is at its end. So prompts are samples
without a response, and there is one way to generate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from coalign.data.batch import Batch
from coalign.types import TOKEN_COLUMNS, Status

LOG = {"loss_mask": False, "rollout_logprobs": 0.0, "versions": -1}  # of a token that nobody chose


class Generated(Protocol):
    """tokens i32[R], logprobs f32[R], versions i32[R] that were chosen, and how they end."""

    tokens: Tensor
    logprobs: Tensor
    versions: Tensor
    status: Status


def begin(prompts: Batch, samples: int) -> Batch:
    """``samples`` samples of each prompt, which have no response yet: ordered by prompt, then index.

    prompts: columns ``tokens`` and ``group``, and any of the sequence kind, which are repeated; a column ``samples``
    says how many there are of each, in place of the argument.
    """
    counts = prompts["samples"].long() if "samples" in prompts else torch.full((len(prompts),), samples)
    repeated = prompts.without("samples").select(torch.arange(len(prompts)).repeat_interleave(counts))
    log = {name: torch.full((repeated.tokens_total,), value, dtype=TOKEN_COLUMNS[name]) for name, value in LOG.items()}
    sequence = {
        "index": (torch.arange(len(repeated)) - (counts.cumsum(0) - counts).repeat_interleave(counts)).int(),
        "prompt_length": repeated.lengths.to(torch.int32),
        "status": torch.full((len(repeated),), int(Status.PARTIAL), dtype=torch.uint8),
    }
    token = {"tokens": repeated["tokens"].to(torch.int32), **log}
    return Batch(repeated.lengths, token, {**repeated.sequence, **sequence})


def extend(samples: Batch, rows: Sequence[int], responses: Sequence[Generated]) -> Batch:
    """The samples with ``responses[i]`` added to ``rows[i]`` (ascending); the others as they are."""
    grown = torch.zeros(len(samples), dtype=torch.int64)
    grown[list(rows)] = torch.tensor([len(r.tokens) for r in responses], dtype=torch.int64)
    lengths = samples.lengths + grown
    pairs = torch.stack([samples.lengths, grown], 1).flatten()
    new = torch.tensor([False, True]).repeat(len(samples)).repeat_interleave(pairs)

    def column(name: str, parts: Sequence[Tensor]) -> Tensor:
        out = torch.empty(len(new), dtype=TOKEN_COLUMNS[name])
        out[~new] = samples[name]
        out[new] = torch.cat([out[:0], *parts])
        return out

    token = {
        "tokens": column("tokens", [r.tokens for r in responses]),
        "loss_mask": column("loss_mask", [torch.ones(len(r.tokens), dtype=torch.bool) for r in responses]),
        "rollout_logprobs": column("rollout_logprobs", [r.logprobs for r in responses]),
        "versions": column("versions", [r.versions for r in responses]),
    }
    status = samples["status"].clone()
    status[list(rows)] = torch.tensor([int(r.status) for r in responses], dtype=status.dtype)
    return Batch(lengths, token, {**samples.sequence, "status": status})


def missing_groups(samples: Batch, min_complete: float) -> int:
    """How many more groups have to be complete until the share ``min_complete`` of all is (those of this worker)."""
    group, waiting = samples["group"], samples["status"] == Status.PARTIAL
    groups, incomplete = len(group.unique()), len(group[waiting].unique())
    return max(0, math.ceil(min_complete * groups - 1e-9) - (groups - incomplete))
