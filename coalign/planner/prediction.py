"""Predicts a whole step: its phases on the device groups, and the idleness between them."""

from __future__ import annotations

from dataclasses import dataclass

from coalign.planner.constants import Constants
from coalign.planner.gpus import ClusterSpec
from coalign.planner.job import JobShape


@dataclass(frozen=True)
class StepPhase:
    """What one model does in one stretch of a step, on the devices of one group; seconds from the step's begin."""

    name: str  # generate, score, train, optimizer, sync, load, offload, reward, overhead
    model: str
    group: str
    start: float
    end: float
    devices: int

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class StepPrediction:
    """A predicted step in steady state: its seconds, and who is busy when.

    ``idle`` is by device group the share of its device-seconds in which no model computes; ``bubble`` by trainer the
    share of its time that its pipeline waits; ``mfu`` the model FLOPs (without recomputation) of training, scoring and
    generation over what all devices could do.
    """

    seconds: float
    phases: tuple[StepPhase, ...]
    tokens_per_second: float
    mfu: float
    trainer_mfu: float
    idle: dict[str, float]
    bubble: dict[str, float]
    staleness: float
    dropped: float

    def phase_seconds(self) -> dict[str, float]:
        """Return the seconds of each kind of phase, summed over models."""
        totals: dict[str, float] = {}
        for phase in self.phases:
            totals[phase.name] = totals.get(phase.name, 0.0) + phase.seconds
        return totals


def predict_step(job: JobShape, cluster: ClusterSpec, constants: Constants) -> StepPrediction:
    """Predict one step of ``job`` in steady state on ``cluster``. Raises ValueError for a layout that cannot be."""
    raise NotImplementedError
