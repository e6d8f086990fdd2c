"""Responses put after prompts that they do not answer: what KTO measures its reference point on (2402.01306, §4.1).

What is trained on, of the batches of the last steps: ``fn(*batches, ...)``, the newest last, returns one batch.
"""

from __future__ import annotations

import torch

from coalign.algorithms.segments import segment_sum
from coalign.data.batch import Batch
from coalign.types import Metric, Total


def mismatch(batch: Batch) -> Batch:
    """Each row's prompt with the response of the next row (cyclically) that is of another group.

    Rotated, not reversed or drawn: every response is used, and no row meets its own, whatever the number of rows.
    Columns: tokens, loss_mask, group, prompt_length. Raises ValueError if all rows are of one group.
    """
    groups = batch["group"].tolist()
    if len(set(groups)) < 2:
        raise ValueError(
            "the step holds a single row, so there is no other prompt's response to measure the reference point on: "
            "raise runtime.prompts_per_step"
        )
    n, prompts, offsets = len(batch), batch["prompt_length"].tolist(), batch.offsets.tolist()
    tokens, masks, lengths = [], [], []
    for row in range(n):
        other = next((row + step) % n for step in range(1, n) if groups[(row + step) % n] != groups[row])
        prompt = slice(offsets[row], offsets[row] + prompts[row])
        response = slice(offsets[other] + prompts[other], offsets[other + 1])
        tokens += [batch["tokens"][prompt], batch["tokens"][response]]
        masks += [torch.zeros(prompts[row], dtype=torch.bool), batch["loss_mask"][response]]
        lengths.append(prompts[row] + response.stop - response.start)
    return Batch(
        torch.tensor(lengths),
        {"tokens": torch.cat(tokens), "loss_mask": torch.cat(masks)},
        {"group": batch["group"], "prompt_length": batch["prompt_length"]},
    )


def with_reference_point(batch: Batch, mismatched: Batch) -> Batch:
    """``batch`` with the column reference_point, f32[N]: z0 = max(0, mean over rows of log π(y'|x) - log π_ref(y'|x)).

    ``mismatched`` has the columns old_logprobs (the policy's) and ref_logprobs.
    """
    mask = mismatched["loss_mask"]
    difference = (mismatched["old_logprobs"] - mismatched["ref_logprobs"])[mask].double()
    divergence = segment_sum(difference, mismatched.segment[mask], len(mismatched))
    return batch.with_(reference_point=divergence.mean().clamp(min=0.0).float().expand(len(batch)).clone())


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
