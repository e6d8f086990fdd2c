"""Regression of a value model on returns."""

from __future__ import annotations

import torch

from coalign.algorithms.traits import read
from coalign.types import LossInput, LossOutput, Stat


def value(x: LossInput, *, clip: float | None = None) -> LossOutput:
    """½ (V - R)² per token; with ``clip`` c, ½ max((V - R)², (V_old + clip(V - V_old, -c, c) - R)²).

    The clipped form is that of OpenAI's PPO. Reads values, returns; old_values if ``clip``.
    """
    values, returns = read(x, "values"), read(x, "returns")
    error = (values - returns).square()
    stats = {"values": Stat.of(values), "returns": Stat.of(returns), "squared_error": Stat.of(error)}
    if clip is not None:
        old = read(x, "old_values", "clip")
        clipped = (old + (values - old).clamp(-clip, clip) - returns).square()
        stats["clip_fraction"] = Stat.of(clipped > error)
        error = torch.maximum(error, clipped)
    return LossOutput(error / 2, stats)
