"""Functions from batches to a batch of other rows: KTO's mismatched responses, and replay of earlier batches.

`replay.fn` names a function of this module: ``fn(*batches, ...)``, newest batch last, returns the batch to train on.
"""

from __future__ import annotations

import torch

from coalign.algorithms.segments import segment_sum
from coalign.data.batch import Batch
from coalign.types import Metric, Total


def mismatch(batch: Batch, *, longest: int | None = None) -> Batch:
    """Join each row's prompt with the response of the next row (cyclically) of another group (2402.01306, §4.1).

    The rotation uses all responses, and no prompt gets its own. A response is truncated where the sequence would have
    more than ``longest`` tokens. Columns: tokens, loss_mask, group, prompt_length. ValueError if all rows belong to one
    group.
    """
    groups = batch["group"].tolist()
    if len(set(groups)) < 2:
        raise ValueError(
            "the step holds a single row, so there is no other prompt's response to measure the reference point on: "
            "raise runtime.prompts_per_step or runtime.tokens_per_step"
        )
    n, prompts, offsets = len(batch), batch["prompt_length"].tolist(), batch.offsets.tolist()
    tokens, masks, lengths = [], [], []
    for row in range(n):
        partner = next((row + step) % n for step in range(1, n) if groups[(row + step) % n] != groups[row])
        prompt = slice(offsets[row], offsets[row] + prompts[row])
        start, stop = offsets[partner] + prompts[partner], offsets[partner + 1]
        response = slice(start, stop if longest is None else min(stop, start + longest - prompts[row]))
        tokens += [batch["tokens"][prompt], batch["tokens"][response]]
        masks += [torch.zeros(prompts[row], dtype=torch.bool), batch["loss_mask"][response]]
        lengths.append(prompts[row] + response.stop - response.start)
    return Batch(
        torch.tensor(lengths),
        {"tokens": torch.cat(tokens), "loss_mask": torch.cat(masks)},
        {"group": batch["group"], "prompt_length": batch["prompt_length"]},
    )


def with_reference_point(batch: Batch, mismatched: Batch) -> Batch:
    """Add the column reference_point, f32[N]: KTO's z0 = max(0, mean over rows of log π(y'|x) - log π_ref(y'|x)).

    ``mismatched`` (see `mismatch`) has the columns old_logprobs (the policy's) and ref_logprobs.
    """
    mask = mismatched["loss_mask"]
    difference = (mismatched["old_logprobs"] - mismatched["ref_logprobs"])[mask].double()
    divergence = segment_sum(difference, mismatched.segment[mask], len(mismatched))
    return batch.with_(reference_point=divergence.mean().clamp(min=0.0).float().expand(len(batch)).clone())


def mix(*batches: Batch, share: float = 0.5) -> tuple[Batch, dict[str, Metric]]:
    """Return the newest batch and ``share`` times as many groups of the older ones, drawn without replacement.

    The newest batch's first group seeds the draw, so a resumed run draws the same. Metric: replay/sequences.
    """
    if share < 0:
        raise ValueError(f"replay.share is {share}; expected 0 or more (groups replayed for each new one)")
    *older, newest = batches
    old = Batch.concat(older) if older else newest.slice(0, 0)
    old_groups = torch.unique(old["group"])
    wanted = round(share * len(torch.unique(newest["group"])))
    random = torch.Generator().manual_seed(int(newest["group"][0]))
    chosen = old_groups[torch.randperm(len(old_groups), generator=random)[:wanted]]
    replayed = old.select(torch.isin(old["group"], chosen))
    return Batch.concat([newest, replayed]), {"replay/sequences": Total(float(len(replayed)))}


__all__ = ["mix"]  # what `replay.fn` can name
