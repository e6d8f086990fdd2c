"""LossInputs for losses that compare responses."""

import torch

from coalign.types import LossInput


def responses(logprobs, *, ref=None, group=None, **columns):
    """A float64 LossInput of responses given as lists of token log-probs; ``ref`` likewise, or None.

    Two neighbours are a group unless ``group`` says otherwise; ``columns`` are sequence columns.
    """
    lengths = torch.tensor([len(r) for r in logprobs])
    group = torch.arange(len(logprobs)) // 2 if group is None else torch.tensor(group)
    return LossInput(
        segment=torch.arange(len(logprobs)).repeat_interleave(lengths),
        sequences=len(logprobs),
        logprobs=flat(logprobs),
        ref=None if ref is None else flat(ref),
        group=group,
        groups=int(group.max()) + 1,
        columns={name: torch.as_tensor(c, dtype=torch.float64) for name, c in columns.items()},
    )


def flat(rows):
    tensors = [torch.as_tensor(row, dtype=torch.float64) for row in rows]
    return torch.cat([torch.zeros(0, dtype=torch.float64), *tensors])
