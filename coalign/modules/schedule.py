"""The learning rate as a pure function of how far a run is."""

from __future__ import annotations

import math

from coalign.config.schema import OptimizerConfig


def learning_rate(place: int, config: OptimizerConfig, *, total: int) -> float:
    """Of the optimizer step that ends with unit ``place`` (from 0) of the ``total`` of the run.

    A unit is an optimizer step, or a token trained on; ``warmup`` and ``decay`` count the same units. Linear warm-up:
    unit ``place`` of the first W gets lr * (place + 1) / (W + 1). Then the schedule falls so that the last unit has the
    floor, lr * min_lr_ratio; a longer run stays there.
    """
    if place < config.warmup:
        return config.lr * (place + 1) / (config.warmup + 1)
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * _left(place, config, total))


def _left(place: int, config: OptimizerConfig, total: int) -> float:
    """From 1 at the schedule's start to 0 at its end."""
    if config.schedule == "constant" or (config.schedule == "wsd" and not config.decay):
        return 1.0
    start = total - 1 - config.decay if config.schedule == "wsd" else config.warmup
    done = min(1.0, max(0.0, (place - start) / max(1, total - 1 - start)))
    return 0.5 * (1.0 + math.cos(math.pi * done)) if config.schedule == "cosine" else 1.0 - done
