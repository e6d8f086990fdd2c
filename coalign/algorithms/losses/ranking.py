"""Reward models from comparisons."""

from __future__ import annotations

from coalign.algorithms.losses.comparison import logistic, reward_stats
from coalign.algorithms.pairs import pairs_of
from coalign.algorithms.traits import read
from coalign.types import LossInput, LossOutput, Stat


def bradley_terry(x: LossInput, *, centre_coef: float = 0.0) -> LossOutput:
    """-log σ(s_w - s_l - margin), a value per group: the mean over all its pairs (2203.02155 for k > 2).

    The log-exp form log(1 + e^(s_l - s_w + margin)) is the same number; it is computed by softplus and cannot overflow.
    ``margin`` is the pair's difference in the column `margin`, where the batch has one (2307.09288).
    ``centre_coef`` adds that much of (s_w + s_l)², which keeps scores around 0 (2312.09244).

    Reads scores and the column `preference`. Statistics: `accuracy` (ties count half), `margin`, `rewards/chosen`,
    `rewards/rejected` over pairs; `scores` and `scores_squared`, whose means give mean and variance, over responses.
    """
    pairs, scores = pairs_of(x), read(x, "scores").double()
    z = pairs.difference(scores)
    if "margin" in x.columns:
        z = z - pairs.difference(x.columns["margin"])
    losses = logistic(z)
    if centre_coef:
        losses = losses + centre_coef * sum(pairs.split(scores)).square()
    stats = {"scores": Stat.of(scores), "scores_squared": Stat.of(scores.square())}
    return LossOutput(pairs.mean(losses), stats | reward_stats(pairs, scores.detach()))


bradley_terry.per = "group"
