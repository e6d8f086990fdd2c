"""Losses and rewards: sections that configure a function, with what the framework does around it."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from coalign.config.errors import Conflict
from coalign.config.schema.base import Function


class LossConfig(Function):
    """A loss and how its per-token values become one number."""

    aggregation: Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"] = "token_mean"
    """Denominator, always global over the optimizer step: tokens; sequences of token means; sequences of token sums;
    or sequences x `constant_length` (Dr.GRPO)."""
    constant_length: PositiveInt | None = None
    """Tokens that a sequence counts for under `constant`."""

    @model_validator(mode="after")
    def _constant_has_a_length(self) -> Self:
        if self.aggregation == "constant" and self.constant_length is None:
            raise Conflict(("constant_length",), "missing: aggregation `constant` needs it (usually max_new_tokens)")
        if self.aggregation != "constant" and self.constant_length is not None:
            raise Conflict(("constant_length",), f"has no effect with aggregation `{self.aggregation}`; use `constant`")
        return self


class RewardConfig(Function):
    """One reward function."""

    name: str | None = None
    """Of its column, `reward/<name>`; None: the function's."""
    weight: float = 1.0
    """0: the function is only logged."""
    timeout: PositiveFloat = 30.0
    """Seconds one call may take before it counts as failed."""
    retries: NonNegativeInt = 2
