"""The reward that an environment gave."""

from __future__ import annotations

from coalign.types import Sample


def episode(sample: Sample) -> float:
    """The sum of what the environment gave for the turns (`Episode.reward`).

    Raises ValueError for a sample that no environment played.
    """
    if sample.turn_rewards is None:
        raise ValueError("no environment gave this sample a reward: `rollout.fn` names one (docs/environments.md)")
    return float(sample.turn_rewards.double().sum())
