"""What is trained on, of the batches of the last steps: ``fn(*batches, ...)``, the newest last, returns one batch."""

from __future__ import annotations

import torch

from coalign.data.batch import Batch
from coalign.types import Metric, Total

__all__ = ["mix"]


def mix(*batches: Batch, share: float = 0.5) -> tuple[Batch, dict[str, Metric]]:
    """The newest batch, and of the older ones ``share`` times as many groups as it has, drawn without replacement.

    The draw follows from the newest batch's first group, so a run that goes on from a checkpoint draws the same.
    Metric: replay/sequences.
    """
    if share < 0:
        raise ValueError(f"replay.share is {share}; expected 0 or more (groups replayed for each new one)")
    *older, newest = batches
    old = Batch.concat(older) if older else newest.slice(0, 0)
    known = torch.unique(old["group"])
    wanted = round(share * len(torch.unique(newest["group"])))
    random = torch.Generator().manual_seed(int(newest["group"][0]))
    chosen = known[torch.randperm(len(known), generator=random)[:wanted]]
    again = old.select(torch.isin(old["group"], chosen))
    return Batch.concat([newest, again]), {"replay/sequences": Total(float(len(again)))}
