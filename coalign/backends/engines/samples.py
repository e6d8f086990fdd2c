"""Generated samples as a Batch: samples that have begun, and the responses that extend them.

A sample whose status is PARTIAL goes on after the tokens that it has; any other is finished. Prompts are samples
without a response, so there is one way to generate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from coalign.backends.engines.request import Response
from coalign.data.batch import Batch
from coalign.types import TOKEN_COLUMNS, Status

LOG = {"loss_mask": False, "rollout_logprobs": 0.0, "versions": -1}  # of tokens that no policy chose


def begin_samples(prompts: Batch, samples: int) -> Batch:
    """Repeat each prompt as ``samples`` samples without a response, ordered by prompt, then index.

    prompts: columns ``tokens`` and ``group``, and any sequence columns, which are repeated. A column ``samples`` holds
    a number for each prompt and replaces the argument.
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


def extend_samples(samples: Batch, rows: Sequence[int], responses: Sequence[Response]) -> Batch:
    """Append ``responses[i]`` to row ``rows[i]`` (ascending); the other rows stay as they are."""
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


def count_missing_groups(samples: Batch, min_complete: float) -> int:
    """Count the groups that must still be completed to reach the share ``min_complete`` of this worker's groups."""
    group, waiting = samples["group"], samples["status"] == Status.PARTIAL
    groups, incomplete = len(group.unique()), len(group[waiting].unique())
    return max(0, math.ceil(min_complete * groups - 1e-9) - (groups - incomplete))
