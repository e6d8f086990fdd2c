"""A sweep: trials of one run with other settings, and which of them end early."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from coalign.config.errors import Conflict
from coalign.config.schema.section import InputPath, OutputPath, Section


class AshaConfig(Section):
    """Asynchronous successive halving (1810.05934): at steps that lie ever farther apart, the worst trials end."""

    grace_steps: PositiveInt = 1
    """Steps that every trial makes."""
    reduction: Annotated[float, Field(gt=1.0)] = 4.0
    """One of this many trials goes on at each rung, and the next rung lies this many times farther."""


class MedianConfig(Section):
    """A trial ends if its best value so far is worse than the median of the other trials' running means (Vizier)."""

    grace_steps: PositiveInt = 1
    """Steps that every trial makes."""
    min_trials: PositiveInt = 3
    """The number of other trials that must have come as far."""


class SweepConfig(Section):
    """A sweep, as one YAML file."""

    base: Annotated[str, InputPath("file")]
    """The YAML of the run that trials vary."""
    output: Annotated[str, OutputPath()] = "runs/sweep"
    """The folder of the sweep, with `trial_NNN_…/` for each trial, a run folder."""
    space: Annotated[dict[str, Any], Field(min_length=1)]
    """Keys of the run (`models.trainer.optimizer.lr`), and for each a list of values, or a distribution: `{uniform:
    [LOW, HIGH]}`, `{loguniform: [LOW, HIGH]}`, `{randint: [LOW, HIGH]}` (both included), `{choice: [...]}`."""
    search: Literal["grid", "random"] = "grid"
    """`grid`: all combinations of lists. `random`: `trials` draws."""
    trials: PositiveInt | None = None
    """Number of draws of a random search."""
    seed: NonNegativeInt = 0
    """The seed of the draws of a random search."""
    metric: str
    """A metric of metrics.jsonl, such as `eval/mean`. The last value of a trial counts."""
    mode: Literal["max", "min"] = "max"
    scheduler: Literal["none", "asha", "median"] = "none"
    """Which trials end early, by Ray Tune's schedulers (the extra `ray`)."""
    asha: AshaConfig = AshaConfig()
    median: MedianConfig = MedianConfig()
    concurrent: PositiveInt = 1
    """Trials that run at once, each in a process of its own. They share the machine's devices out between them, unless
    the run has a Ray cluster."""

    def check(self) -> None:
        if self.search == "random" and self.trials is None:
            raise Conflict(("trials",), "missing: a random search needs the number of its trials")
        if self.search == "grid" and self.trials is not None:
            raise Conflict(("trials",), "has no effect with `search: grid`, which tries all combinations")
        for name in ("asha", "median"):
            if name in self.model_fields_set and self.scheduler != name:
                raise Conflict((name,), f"has no effect with `scheduler: {self.scheduler}`")
