"""Decides by Ray Tune's schedulers which trials of a sweep end early. Their processes are not Ray's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

from ray.tune.schedulers import AsyncHyperBandScheduler, MedianStoppingRule, TrialScheduler

STEP, VALUE = "step", "value"  # keys of a result


@dataclass(frozen=True)
class TuneTrial:
    """What a scheduler reads of a trial: its name."""

    trial_id: str


class RunningTrials:
    """What a scheduler reads of the controller of trials: those that wait, of which there are none."""

    def get_live_trials(self) -> list[TuneTrial]:
        return []


class EarlyStopping:
    """Asks a scheduler of Ray Tune after every report of a trial. Reports of one trial must come in order."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._trials: dict[str, TuneTrial] = {}
        self._controller = cast(Any, RunningTrials())

    @classmethod
    def by_halving(cls, mode: Literal["max", "min"], steps: int, grace: int, reduction: float) -> EarlyStopping:
        """ASHA (1810.05934), for trials of ``steps`` steps that all make ``grace``."""
        # It need not end trials at their last step: they end there by themselves.
        return cls(
            AsyncHyperBandScheduler(
                STEP,
                VALUE,
                mode,
                max_t=max(steps, grace),
                grace_period=grace,
                reduction_factor=reduction,
                stop_last_trials=False,
            )
        )

    @classmethod
    def by_median(cls, mode: Literal["max", "min"], grace: int, trials: int) -> EarlyStopping:
        """The median rule of Vizier, once so many other ``trials`` have come as far."""
        return cls(MedianStoppingRule(STEP, VALUE, mode, grace_period=grace, min_samples_required=trials))

    def goes_on(self, trial: str, step: int, value: float) -> bool:
        """Report a value, and return whether the trial should go on."""
        if trial not in self._trials:
            self._trials[trial] = TuneTrial(trial)
            self._scheduler.on_trial_add(self._controller, self._trials[trial])
        result = {STEP: step, VALUE: value}
        action = self._scheduler.on_trial_result(self._controller, self._trials[trial], result)
        return action == TrialScheduler.CONTINUE
