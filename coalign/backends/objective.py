"""Turns model outputs into a loss: builds what a loss function reads, and weights its values by global counts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from coalign.algorithms.aggregate import (
    LossTotals,
    aggregation_weights,
    check_aggregation,
    group_weights,
    required_inputs,
    sequence_weights,
    value_unit,
)
from coalign.algorithms.importance import mismatch_stats
from coalign.backends.layout import get_loss_mask
from coalign.config.errors import located_at, parse_key
from coalign.config.functions import bind, resolve
from coalign.config.schema import LossConfig
from coalign.data.batch import Batch
from coalign.devices import move_tensors
from coalign.types import LossInput, Stats

# Field of LossInput -> the column that it comes from, if the batch has that column.
FIELDS = {
    "old": "old_logprobs",
    "rollout": "rollout_logprobs",
    "ref": "ref_logprobs",
    "advantages": "advantages",
    "returns": "returns",
    "old_values": "values",
}

OWN_STATISTICS = {"value", "grad_norm", "lr", "skipped_updates", "not_finite"}


class Objective:
    """A loss with its configuration: (micro-batch, model outputs) -> the micro-batch's part of the global loss."""

    def __init__(
        self,
        fn: str,
        *,
        aggregation: str = "token_mean",
        constant_length: int | None = None,
        where: str = "loss",
        **arguments: Any,
    ) -> None:
        """``fn`` names the loss; ``where`` is the dotted path of its section, for errors.

        Raises ConfigError for wrong arguments, ValueError for a loss that is not there or an aggregation that has no
        meaning for it.
        """
        with located_at(*parse_key(where), "fn"):
            loss = resolve(fn, LossConfig.home)
        arguments = bind(loss, arguments, where)
        check_aggregation(loss, fn, aggregation, where)
        self.name = fn
        self.where = where
        self.loss = partial(loss, **arguments)
        self.needs = required_inputs(loss, arguments)
        self.per = value_unit(loss)
        self.aggregation = aggregation
        self.weights = partial(aggregation_weights, aggregation=aggregation, constant_length=constant_length)

    @classmethod
    def of(cls, config: LossConfig, where: str) -> Objective:
        """The loss that the section at ``where`` describes."""
        return cls(
            config.fn,
            aggregation=config.aggregation,
            constant_length=config.constant_length,
            where=where,
            **config.arguments,
        )

    def __call__(self, micro: Batch, outputs: Mapping[str, Tensor], totals: LossTotals) -> tuple[Tensor, Stats]:
        """The scalar to differentiate, and the loss's statistics.

        Where the batch has the sampler's log-probs, the statistics include how far the loss's anchor is from them
        (coalign.algorithms.importance.mismatch_stats). ``totals`` are those of the whole optimizer step over all ranks,
        so the gradient does not depend on how the step was cut. Raises ValueError for a wrong number of values.
        """
        x = loss_input(micro, outputs)
        result = self.loss(x)
        weights = self._weights(x, totals)
        if len(result.value) != len(weights):
            raise ValueError(
                f"the loss returned {len(result.value)} values; expected {len(weights)}, one per {self.per} (its "
                "attribute `per` says which: token, sequence, group or batch)"
            )
        if taken := OWN_STATISTICS & set(result.stats):
            raise ValueError(
                f"the loss returned statistics named {sorted(taken)}, which the training step itself reports"
            )
        mismatch: Stats = {}
        if x.logprobs is not None and x.old is not None and x.rollout is not None:
            mismatch = mismatch_stats(x.old, x.rollout)
        return (result.value * weights.to(result.value)).sum(), {**mismatch, **result.stats}

    @property
    def compares(self) -> bool:
        """Whether the loss compares responses with each other, so that no token has an importance ratio of its own."""
        return self.per in ("group", "batch")

    def count(self, totals: LossTotals) -> float:
        """The number of values that the loss is the mean of: a step's weight when several steps are averaged."""
        if self.per == "token" and self.aggregation != "token_mean":
            return totals.sequences
        return {"token": totals.tokens, "sequence": totals.sequences, "group": totals.groups, "batch": 1.0}[self.per]

    def _weights(self, x: LossInput, totals: LossTotals) -> Tensor:
        if self.per == "token":
            return self.weights(x.segment, x.sequences, totals=totals)
        if self.per == "sequence":
            return sequence_weights(x.segment, x.sequences, totals=totals)
        if self.per == "group":
            return group_weights(x.groups, totals=totals, device=x.segment.device)
        return torch.ones(1)


def loss_input(micro: Batch, outputs: Mapping[str, Tensor]) -> LossInput:
    """What a loss reads: the trained tokens of ``micro`` and the model's outputs, on the outputs' device. Without an
    ``old_logprobs`` column the anchor of the importance ratio is the current policy itself."""
    mask = get_loss_mask(micro)
    device = next(iter(outputs.values())).device
    groups = groups_of(micro)
    token = {("column", name): column[mask] for name, column in micro.token.items()}
    sequence = {("column", name): column for name, column in micro.sequence.items() if isinstance(column, Tensor)}
    derived = {("derived", "segment"): micro.segment[mask], ("derived", "group"): groups}
    moved = move_tensors(token | sequence | derived, device)
    columns = {**micro.sequence, **{name: tensor for (kind, name), tensor in moved.items() if kind == "column"}}
    fields = {field: columns.get(column) for field, column in FIELDS.items()}
    if fields["old"] is None and "logprobs" in outputs:
        fields["old"] = outputs["logprobs"].detach()
    return LossInput(
        segment=moved["derived", "segment"],
        sequences=len(micro),
        group=moved["derived", "group"],
        groups=int(groups[-1]) + 1 if len(groups) else 0,
        columns=columns,
        **fields,
        **outputs,
    )


def groups_of(batch: Batch) -> Tensor:
    """i64[N], from 0: the number of each sequence's group, a run of equal neighbours in the column ``group``. Without
    that column each sequence is a group."""
    if "group" not in batch:
        return torch.arange(len(batch))
    return torch.unique_consecutive(cast(Tensor, batch["group"]), return_inverse=True)[1]
