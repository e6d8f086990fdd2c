"""Language modelling."""

from __future__ import annotations

from coalign.algorithms.traits import read
from coalign.types import LossInput, LossOutput, Stat


def sft(x: LossInput) -> LossOutput:
    """Negative log-likelihood of each trained token, in nats. Reads logprobs."""
    nll = -read(x, "logprobs")
    return LossOutput(nll, {"nll": Stat.of(nll)})
