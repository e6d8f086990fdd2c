"""What sections are made of: strict mappings of known keys, functions with their arguments, paths that must exist.

Losses and rewards: sections that configure a function, with what the framework does around it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from coalign.config.errors import Conflict

Item = TypeVar("Item")
Probability = Annotated[float, Field(ge=0.0, le=1.0)]
OneOrMore = Annotated[list[Item], BeforeValidator(lambda value: [value] if isinstance(value, str | dict) else value)]
"""A list; a single item may stand without the brackets."""


@dataclass(frozen=True)
class InputPath:
    """Marks a text as the path of something that must exist before a run."""

    kind: Literal["file", "directory"]


class NoEffect:
    """Marks a setting that does not change what is computed, whatever its value."""


class DrawSetting:
    """Marks a setting of `data` that decides which rows are drawn and when, but not what a row becomes."""


Drawn = Annotated[Item, DrawSetting()]


class FunctionSetting:
    """Marks a setting of a part of the reward that only functions have."""


ResultNeutral = Annotated[Item, NoEffect()]
"""A setting that does not change results: a finished stage of a pipeline stays valid when it changes. All settings
without this mark count as changing results."""


class Section(BaseModel):
    """A mapping of known keys. ``shorthand`` names the key that a plain text in place of the mapping stands for."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, validate_default=True, use_attribute_docstrings=True
    )
    shorthand: ClassVar[str | None] = None

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {cls.shorthand: value} if cls.shorthand and isinstance(value, str) else value


class Function(Section):
    """A function by short name or dotted path (``my.pkg:fn``); every other key is one of its keyword-only arguments."""

    model_config = ConfigDict(extra="allow")
    shorthand = "fn"

    fn: str

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments for the function."""
        return dict(self.model_extra or {})


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
    timeout: Annotated[PositiveFloat, FunctionSetting()] = 30.0
    """Of a function: seconds one call may take before it counts as failed."""
    retries: Annotated[NonNegativeInt, FunctionSetting()] = 2
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
            marked = [(n, f) for n, f in type(self).model_fields.items() if FunctionSetting in map(type, f.metadata)]
            for name in [*self.arguments, *(n for n, f in marked if getattr(self, n) != f.default)]:
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
