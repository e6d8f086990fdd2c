"""Losses and rewards: sections that configure a function, with what the framework does around it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, Self

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from coalign.config.errors import Conflict
from coalign.config.schema.base import Function

FUNCTIONS = "reward_functions"  # the worker in which reward functions run, among the models of a run


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
    """One part of the reward: a function (``fn``, with its arguments), or a reward model of the run (``model``)."""

    fn: str | None = None
    model: str | None = None
    """A key of `models`, with `head: reward`."""
    name: str | None = None
    """Of its column, `reward/<name>`; None: the function's or the model's."""
    weight: float = 1.0
    """0: it is only logged."""
    normalise: Literal["none", "batch", "group", "running"] = "none"
    """To mean 0 and variance 1 before it is weighed: over the batch, over each prompt's samples, or over all that the
    run has seen so far. Evaluation takes the values as they are."""
    clip: PositiveFloat | None = None
    """Bounds the value, after `normalise`, to [-clip, clip]."""
    timeout: PositiveFloat = 30.0
    """Of a function: seconds one call may take before it counts as failed."""
    retries: NonNegativeInt = 2
    """Of a function: calls after one that failed."""

    @property
    def called(self) -> str:
        """Its name; a function's is the last part of its path."""
        return self.name or self.model or re.split(r"[:.]", self.fn)[-1]

    @model_validator(mode="after")
    def _is_one_of_two(self) -> Self:
        if (self.fn is None) == (self.model is None):
            found = "both" if self.fn else "neither"
            raise ValueError(f"has {found} of `fn` (a function) and `model` (a reward model of the run); expected one")
        if self.model:
            defaults = {name: type(self).model_fields[name].default for name in ("timeout", "retries")}
            given = [name for name, default in defaults.items() if getattr(self, name) != default]
            for name in [*self.arguments, *given]:
                raise Conflict((name,), "is for functions; a model is set up under `models`")
        return self


def check_rewards(rewards: Sequence[RewardConfig]) -> None:
    """Refuse (Conflict) parts of a reward that have the same name, and a reward in which nothing counts."""
    names = [reward.called for reward in rewards]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise Conflict(("reward", index), f"a second reward is called '{name}'; give it a `name`")
    if rewards and not any(reward.weight for reward in rewards):
        raise Conflict(("reward",), "every part has weight 0, so there is nothing to learn from")
