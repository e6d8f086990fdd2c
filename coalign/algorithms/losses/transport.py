"""Alignment by optimal transport: not pairs but the distributions of rewards over a whole batch are compared.

The better responses' rewards, sorted, shall lie above the worse ones', sorted (stochastic dominance; AOT, 2406.05882).
Sorting needs every pair at once, so an update is one micro-batch; the value is one number, the mean over all pairs of
the batch. Reads logprobs, ref and the column `preference`.
"""

from __future__ import annotations

from torch import Tensor

from coalign.algorithms.losses.comparison import check_smoothing, compared, log_ratios, logistic, response_logprobs
from coalign.algorithms.pairs import Pairs, pairs_of
from coalign.types import LossInput, LossOutput


def aot(x: LossInput, *, beta: float = 0.1, label_smoothing: float = 0.0) -> LossOutput:
    """Sorted log π_w - log π_l against sorted log π_ref,w - log π_ref,l, by -log σ(β difference)."""
    pairs, ratios, logprobs = pairs_of(x), log_ratios(x), response_logprobs(x)
    policy, reference = (
        pairs.difference(values).sort().values for values in (logprobs, logprobs.detach() - ratios.detach())
    )
    return _transported(x, pairs, policy - reference, ratios, beta, label_smoothing)


def aot_unpaired(x: LossInput, *, beta: float = 0.1, label_smoothing: float = 0.0) -> LossOutput:
    """Sorted log-ratios of the winners against sorted log-ratios of the losers."""
    pairs, ratios = pairs_of(x), log_ratios(x)
    winner, loser = (values.sort().values for values in pairs.split(ratios))
    return _transported(x, pairs, winner - loser, ratios, beta, label_smoothing)


for _loss in (aot, aot_unpaired):
    _loss.per = "batch"
    _loss.needs = lambda **_: ("ref",)


def _transported(
    x: LossInput, pairs: Pairs, delta: Tensor, ratios: Tensor, beta: float, label_smoothing: float
) -> LossOutput:
    check_smoothing(label_smoothing)
    losses = logistic(beta * delta, label_smoothing)
    stats = compared(x, pairs, losses, beta * ratios).stats
    return LossOutput((losses.sum() / max(1, len(losses)))[None], stats)
