"""What a model learns by: a loss, which is a record of settings with a formula, and the mean taken of its values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from coalign.algorithms.divergence import mismatch_stats
from coalign.algorithms.segments import AGGREGATIONS, LossTotals, aggregation_weights, sequence_shares
from coalign.types import LossInput, LossOutput, Stats

_STEP_STATISTICS = {"value", "grad_norm", "lr", "skipped_updates", "not_finite"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """The base of all losses: frozen dataclasses, whose fields are the settings of the YAML.

    ``per``: what a value stands for: token [T], sequence [N], group [G], or batch [1] (all sequences are compared, so
    an update is one micro-batch). ``aggregations``: those that a loss per token is defined for. ``needs``: the fields
    of LossInput that it reads and that exist only on request. The model computes ``entropy``, ``candidate_logprobs``
    and ``collision``; ``ref`` makes the recipe run a reference. ValueError for settings that have no meaning.
    """

    per: ClassVar[str] = "token"
    aggregations: ClassVar[Sequence[str]] = AGGREGATIONS
    needs: ClassVar[Sequence[str]] = ()

    def __call__(self, x: LossInput) -> LossOutput:
        """The values of a micro-batch, and statistics. ValueError for a column that is missing."""
        raise NotImplementedError

    def refuse(self, reason: str, *settings: str) -> NoReturn:
        """Raise ValueError for what these settings are set to."""
        raise ValueError(" and ".join(f"loss.{name} is {getattr(self, name)!r}" for name in settings) + f": {reason}")


@dataclass(frozen=True, slots=True)
class FunctionLoss(Loss):
    """The loss ``fn(x, **settings)``. The attributes ``per`` and ``aggregations`` of ``fn`` are those of a Loss, and
    its attribute ``needs`` is a function of the settings; each may be missing."""

    fn: Callable[..., LossOutput]
    settings: Mapping[str, Any]

    @property
    def per(self) -> str:
        return getattr(self.fn, "per", Loss.per)

    @property
    def aggregations(self) -> Sequence[str]:
        return getattr(self.fn, "aggregations", Loss.aggregations)

    @property
    def needs(self) -> Sequence[str]:
        declared = getattr(self.fn, "needs", None)
        return () if declared is None else tuple(declared(**self.settings))

    def __call__(self, x: LossInput) -> LossOutput:
        return self.fn(x, **self.settings)


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss and the mean of its values. ``name`` and ``section`` say where the configuration has it, for errors.

    ValueError for an aggregation that has no effect on the loss, or that it is not defined for.
    """

    loss: Loss
    aggregation: str = "token_mean"
    constant_length: int = 1
    name: str = "loss"
    section: str = "loss"

    def __post_init__(self) -> None:
        setting = f"{self.section}.aggregation is `{self.aggregation}`"
        if self.per != "token" and self.aggregation != "token_mean":
            raise ValueError(f"{setting} and has no effect: `{self.name}` takes the mean of a value per {self.per}")
        if self.aggregation not in (allowed := self.loss.aggregations):
            raise ValueError(f"{setting}, which `{self.name}` is not defined for; expected {' or '.join(allowed)}")

    @property
    def per(self) -> str:
        return self.loss.per

    @property
    def needs(self) -> Sequence[str]:
        return self.loss.needs

    @property
    def compares(self) -> bool:
        """Whether the loss compares responses with each other, so that no token has an importance ratio of its own."""
        return self.per in ("group", "batch")

    def __call__(self, x: LossInput, totals: LossTotals) -> tuple[Tensor, Stats]:
        """The micro-batch's share of the global loss, a scalar to differentiate, and the loss's statistics.

        Where the batch has the sampler's log-probs, the statistics include how far the loss's anchor is from them
        (coalign.algorithms.divergence.mismatch_stats). ``totals`` are those of the whole optimizer step over all ranks,
        so the gradient does not depend on how the step was cut. Raises ValueError for a wrong number of values.
        """
        result, weights = self.loss(x), self._weigh(x, totals)
        if len(result.value) != len(weights):
            raise ValueError(
                f"the loss returned {len(result.value)} values; expected {len(weights)}, one per {self.per} (its "
                "attribute `per` says which: token, sequence, group or batch)"
            )
        if taken := _STEP_STATISTICS & set(result.stats):
            raise ValueError(f"the loss returned statistics {sorted(taken)}, which the training step itself reports")
        mismatch: Stats = {}
        if x.logprobs is not None and x.old is not None and x.rollout is not None:
            mismatch = mismatch_stats(x.old, x.rollout)
        return (result.value * weights.to(result.value)).sum(), {**mismatch, **result.stats}

    def count(self, totals: LossTotals) -> float:
        """The number of values that the loss is the mean of: a step's weight when several steps are averaged."""
        if self.per == "token" and self.aggregation != "token_mean":
            return totals.sequences
        return {"token": totals.tokens, "sequence": totals.sequences, "group": totals.groups, "batch": 1.0}[self.per]

    def _weigh(self, x: LossInput, totals: LossTotals) -> Tensor:
        episode_tokens = x.columns.get("episode_tokens")
        if self.per == "token":
            return aggregation_weights(
                x.segment,
                x.sequences,
                aggregation=self.aggregation,
                totals=totals,
                constant_length=self.constant_length,
                episode_tokens=episode_tokens,
            )
        if self.per == "sequence":  # the mean over those with trained tokens
            return sequence_shares(x.segment, x.sequences, episode_tokens) / totals.sequences
        if self.per == "group":
            return torch.full((x.groups,), 1.0 / totals.groups, dtype=torch.float64, device=x.segment.device)
        return torch.ones(1)
