"""Building blocks of the schema: strict sections, sections of functions, marks on fields, losses and rewards."""

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
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from coalign.config.errors import Conflict

Item = TypeVar("Item")
Probability = Annotated[float, Field(ge=0.0, le=1.0)]
OneOrMore = Annotated[list[Item], BeforeValidator(lambda value: [value] if isinstance(value, str | dict) else value)]
"""A list; a single item may be written without brackets."""


@dataclass(frozen=True)
class InputPath:
    """Marks a text as a path that must exist before a run.

    A model is a directory, a GGUF file or a name of the hub; data are a file, a directory, a name of the hub or a URL.
    """

    content: Literal["file", "directory", "model", "data"]


class OutputPath:
    """Marks a text as a path that a run writes, or finds what an earlier one wrote."""


class NoEffect:
    """Marks a setting that does not change results, whatever its value."""


class ContinuationSetting:
    """Marks a setting that may change when a run goes on: how long it trains, what it measures, on what it computes."""


Continuable = Annotated[Item, ContinuationSetting()]


class DrawSetting:
    """Marks a setting of `data` that decides which rows are drawn and when, but not what a row becomes."""


Drawn = Annotated[Item, DrawSetting()]


class _FunctionSetting:
    """Marks a setting of a part of the reward that only functions have."""


ResultNeutral = Annotated[Item, NoEffect()]
"""A setting that does not change results: a finished stage of a pipeline stays valid when it changes. All settings
without this mark count as changing results."""


class Section(BaseModel):
    """A mapping of known keys. A plain text in place of the mapping is the value of the key ``shorthand``."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, validate_default=True, use_attribute_docstrings=True
    )
    shorthand: ClassVar[str | None] = None

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {cls.shorthand: value} if cls.shorthand and isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.check()
        return self

    def check(self) -> None:
        """Raise Conflict (or ValueError) if settings contradict each other. Subclasses extend it."""


class Function(Section):
    """A function by short name or dotted path (``my.pkg:fn``); all other keys are its keyword-only arguments."""

    model_config = ConfigDict(extra="allow")
    shorthand = "fn"
    home: ClassVar[str] = ""  # the module whose short names it takes, if it takes any

    fn: str

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


FUNCTIONS = "reward_functions"  # name, among the models of a run, of the worker that runs reward functions


class LossConfig(Function):
    """A loss, and how its per-token values are aggregated."""

    home = "coalign.algorithms.losses"

    aggregation: Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"] = "token_mean"
    """Divisor of the sum over all rows of an optimizer step. `token_mean`: tokens. `sequence_mean_token_mean`: token
    means are averaged over sequences. `sequence_mean_token_sum`: token sums are. `constant`: sequences x
    `constant_length` (Dr.GRPO)."""
    constant_length: PositiveInt | None = None
    """Tokens that each sequence counts as under `constant`."""

    def check(self) -> None:
        if self.aggregation == "constant" and self.constant_length is None:
            raise Conflict(("constant_length",), "missing: aggregation `constant` needs it (usually max_new_tokens)")
        if self.aggregation != "constant" and self.constant_length is not None:
            raise Conflict(("constant_length",), f"has no effect with aggregation `{self.aggregation}`; use `constant`")


class RewardConfig(Function):
    """One part of the reward: a function (``fn``, with its arguments) or a reward model of the run (``model``)."""

    home = "coalign.rewards"

    fn: str | None = None
    model: str | None = None
    """A key of `models`, with `head: reward`."""
    name: str | None = None
    """Name of its column, `reward/<name>`; None: the function's or the model's name."""
    weight: float = 1.0
    """Factor in the total reward; 0: it is only logged."""
    sources: OneOrMore[str] = []
    """Only rows of these sources get this part (`data_source` of a row, or the name of its file); none: all rows."""
    normalise: Literal["none", "batch", "group", "running"] = "none"
    """Scale to mean 0 and variance 1 before weighting: over the `batch`, over each prompt's samples (`group`), or over
    all values of the run so far (`running`). Evaluation uses the raw values."""
    clip: PositiveFloat | None = None
    """Limit the value, after `normalise`, to [-clip, clip]."""
    timeout: Annotated[PositiveFloat, _FunctionSetting()] = 30.0
    """Functions only: seconds after which a call counts as failed."""
    retries: Annotated[NonNegativeInt, _FunctionSetting()] = 2
    """Functions only: further calls after a failed one. A bug (see `max_bugs`) is not called again."""
    max_bugs: Annotated[Probability, _FunctionSetting()] = 0.5
    """Functions only: share of a batch's samples on which the function may be wrong: it returns None or no number, or
    raises AttributeError, ImportError, KeyError or IndexError, NameError, TypeError or ZeroDivisionError. Above it the
    run ends; 1: never."""
    patience: Annotated[NonNegativeFloat, _FunctionSetting()] = 600.0
    """Functions only: seconds for which calls are repeated while a service does not answer, with the batch kept. Then
    their samples have failed. A part of weight 0 does not wait."""
    process_memory_mb: Annotated[PositiveInt | None, _FunctionSetting()] = None
    """Functions of your own only: limit of the memory of each of their processes; a call that needs more has failed.
    None: no limit but the machine's, on which Linux ends these processes first."""

    @property
    def called(self) -> str:
        """Its name, or the model's, or the last part of the function's path."""
        return self.name or self.model or re.split(r"[:.]", self.fn or "")[-1]

    def check(self) -> None:
        if (self.fn is None) == (self.model is None):
            count = "both" if self.fn else "neither"
            raise ValueError(f"has {count} of `fn` (a function) and `model` (a reward model of the run); expected one")
        if self.model:
            marked = [(n, f) for n, f in type(self).model_fields.items() if _FunctionSetting in map(type, f.metadata)]
            for name in [*self.arguments, *(n for n, f in marked if getattr(self, n) != f.default)]:
                raise Conflict((name,), "is for functions; a model is set up under `models`")


def check_rewards(rewards: Sequence[RewardConfig]) -> None:
    """Raise Conflict if two parts of a reward have the same name, or if all weights are 0."""
    names = [reward.called for reward in rewards]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise Conflict(("reward", index), f"a second reward is called '{name}'; give it a `name`")
    if rewards and not any(reward.weight for reward in rewards):
        raise Conflict(("reward",), "every part has weight 0, so there is nothing to learn from")
