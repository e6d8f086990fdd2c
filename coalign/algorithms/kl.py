"""Estimators of KL(π‖π_ref) from the tokens that π sampled, and controllers of the penalty's coefficient.

With d = log π - log π_ref at the sampled token (Schulman, "Approximating KL divergence", 2020):

========  ==============  ======================================================================================
k1        d               unbiased, either sign; as a loss its gradient has zero mean on policy: for rewards only
k2        d² / 2          biased value; its gradient is that of the reverse KL on policy
k3        e^(-d) - 1 + d  unbiased, never negative, low variance; its gradient is that of the forward KL on policy
========  ==============  ======================================================================================
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MAX_LOG_RATIO = 10.0

__all__ = ["AdaptiveKL", "FixedKL"]  # what `kl.fn` can name


def k1(logprobs: Tensor, ref: Tensor) -> Tensor:
    """d, per token. All arguments and results here are [T], in nats."""
    return logprobs - ref


def k2(logprobs: Tensor, ref: Tensor) -> Tensor:
    """d² / 2, per token; the gradient with respect to log π is d."""
    return (logprobs - ref).square() / 2


def k3(logprobs: Tensor, ref: Tensor) -> Tensor:
    """e^(-d) - 1 + d, per token; the gradient with respect to log π is 1 - e^(-d).

    -d is clamped to at most 10 (value at most e^10 - 11, about 22015), where the gradient is 0: otherwise a token that
    the policy all but ruled out would overflow. Large positive d needs no bound: the value grows linearly.
    """
    log_ratio = (ref - logprobs).clamp(max=MAX_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio


def estimate_kl(logprobs: Tensor, ref: Tensor, estimator: str) -> Tensor:
    """[T]: the estimator by its name, `k1`, `k2` or `k3`; ValueError for another name."""
    estimators = {"k1": k1, "k2": k2, "k3": k3}
    if estimator not in estimators:
        raise ValueError(f"KL estimator '{estimator}': expected one of {', '.join(estimators)}")
    return estimators[estimator](logprobs, ref)


class FixedKL:
    """A constant coefficient."""

    def __init__(self, *, coef: float) -> None:
        self.coef = coef

    def update(self, kl: float, *, samples: int) -> None:
        """A constant ignores the divergence."""

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef = state["coef"]


class AdaptiveKL(FixedKL):
    """A coefficient that is adjusted to keep the divergence near ``target`` (1909.08593, section 2.2).

    ``target`` is in nats per response (the sum over its tokens, as in the paper and as `kl` of shape_reward).
    ``horizon`` is in samples: a divergence that is off by 20 % or more for ``horizon`` samples changes the coefficient
    by a factor of about e^±0.2.
    """

    def __init__(self, *, coef: float, target: float, horizon: int = 10_000) -> None:
        super().__init__(coef=coef)
        if target <= 0 or horizon <= 0:
            raise ValueError(f"AdaptiveKL needs target and horizon above 0, got target={target}, horizon={horizon}")
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, *, samples: int) -> None:
        """Adjust by the mean divergence ``kl`` of ``samples`` responses; ValueError if it is not finite."""
        if not math.isfinite(kl):
            raise ValueError(f"the KL divergence of this step is {kl}; the coefficient cannot follow it")
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.coef *= 1.0 + error * samples / self.horizon
