"""Combines several reward terms into one reward: normalises, clips, weighs and sums them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from coalign.algorithms.advantages import Moments
from coalign.algorithms.segments import RewardGroups

EPS = 1e-6


@dataclass(frozen=True, slots=True)
class RewardTerm:
    """One part of a reward; see coalign.config.schema.RewardConfig."""

    name: str
    weight: float = 1.0
    normalise: Literal["none", "batch", "group", "running"] = "none"
    clip: float | None = None


def combine(values: Tensor, group: Tensor, terms: Sequence[RewardTerm], running: Mapping[str, Moments]) -> Tensor:
    """The sum over terms of weight * clip(normalise(value)): f64[N].

    values [terms, N], finite where the term has weight; group i64[N], in any order. A value is normalised to (value -
    mean) / (std + 1e-6) with the moments of this batch, of its group (2601.05242: before the sum, so that no term
    outweighs the others), or for a `running` term with those in ``running`` (ValueError if they are empty). The
    standard deviation is the population's. Values that are all equal become 0.
    """
    total = torch.zeros(values.shape[1], dtype=torch.float64)
    for term, own in zip(terms, values.double(), strict=True):
        if not term.weight:
            continue
        if term.normalise == "group":
            groups = RewardGroups(own, group)
            own = groups.deviation / (groups.std(unbiased=False)[groups.member] + EPS)
        elif term.normalise != "none":
            moments = running[term.name] if term.normalise == "running" else Moments.of(own)
            if len(own) and not moments.count:
                raise ValueError(
                    f"reward '{term.name}': there are no running moments to normalise it by; score samples before what "
                    "they are compared with"
                )
            own = (own - moments.mean) / (moments.std + EPS)
        total += term.weight * (own if term.clip is None else own.clamp(-term.clip, term.clip))
    return total
