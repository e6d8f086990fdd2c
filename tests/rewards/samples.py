"""Samples for reward tests."""

import torch

from coalign.types import Sample


def sample(response="", *, group=0, index=0, tokens=4, **row):
    """A sample with this response of ``tokens`` trained tokens after one prompt token; ``row`` is the data set's."""
    mask = torch.tensor([False] + [True] * tokens)
    return Sample(
        group,
        index,
        torch.zeros(tokens + 1, dtype=torch.int32),
        mask,
        torch.zeros(tokens + 1),
        response=response,
        meta=row,
    )
