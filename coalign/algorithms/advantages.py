"""Advantages, which `advantage.fn` names: how much better a token turned out than expected, from a whole rollout.

Positional arguments are columns: token columns [T] over all tokens, prompts included, and sequence columns [N]. Results
are f32[T], 0 wherever ``loss_mask`` is False; sums run in float64. Every function also returns metrics.
"""

from __future__ import annotations

from math import comb
from typing import Any, Literal

import torch
from torch import Tensor

from coalign.algorithms.segments import RewardGroups, discounted_sum, segment_count, segment_sum
from coalign.types import Stat


def gae(
    token_rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    segment: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    whiten: bool = True,
) -> dict[str, Any]:
    """Generalised advantage estimation (1506.02438) over the trained tokens of each sequence.

    δ_t = r_t + γ V_{t+1} - V_t, A_t = δ_t + γλ A_{t+1}, returns = A + V, with V = 0 after the last trained token.
    t + 1 is the next *trained* token: tokens of tools or users in between are skipped. ``whiten`` scales the advantages
    of the whole rollout to mean 0 and variance 1, after the returns are computed.
    """
    trained = segment[loss_mask]
    rewards, state_values = token_rewards[loss_mask].double(), values[loss_mask].double()
    following = torch.zeros_like(state_values)
    same = trained[1:] == trained[:-1]
    following[:-1][same] = state_values[1:][same]
    advantages = discounted_sum(rewards + gamma * following - state_values, trained, gamma * lam)
    returns = advantages + state_values
    return {
        "advantages": _spread(_whiten(advantages) if whiten else advantages, loss_mask),
        "returns": _spread(returns, loss_mask),
        "returns/mean": Stat.of(returns),
        "values/mean": Stat.of(state_values),
        "values/squared_error": Stat.of((returns - state_values).square()),
        **_advantage_stats(advantages),
    }


def group(
    reward: Tensor,
    group: Tensor,
    loss_mask: Tensor,
    segment: Tensor,
    *,
    scale: Literal["std", "batch", "none"] = "std",
    unbiased: bool = True,
    eps: float = 1e-6,
) -> dict[str, Any]:
    """GRPO (2402.03300): the reward minus its group's mean, divided by the group's standard deviation plus ``eps``.

    ``scale``: `std`; `batch`, the standard deviation of all rewards of the batch (2508.08221); or `none`, no division
    (Dr. GRPO, 2503.20783). Groups may differ in size and be in any order. A group of one, or one of equal rewards, has
    advantage 0 exactly and counts in `groups/zero_std`.
    """
    groups = RewardGroups(reward, group)
    advantages = groups.deviation
    if scale == "std":
        advantages = advantages / (groups.std(unbiased=unbiased)[groups.member] + eps)
    elif scale == "batch":
        batch = RewardGroups(reward, torch.zeros_like(group))
        advantages = advantages / (batch.std(unbiased=unbiased)[batch.member] + eps)
    return _outcome(advantages, groups, loss_mask, segment)


def rloo(reward: Tensor, group: Tensor, loss_mask: Tensor, segment: Tensor) -> dict[str, Any]:
    """REINFORCE leave-one-out (2402.14740): the reward minus the mean of the *other* samples of its group, if any."""
    groups = RewardGroups(reward, group)
    divisor = (groups.size - 1).clamp(min=1)
    return _outcome(groups.deviation * (groups.size / divisor)[groups.member], groups, loss_mask, segment)


def reinforce_pp(
    token_rewards: Tensor, loss_mask: Tensor, segment: Tensor, *, gamma: float = 1.0, whiten: bool = True
) -> dict[str, Any]:
    """REINFORCE++ (2501.03262): the discounted return of each token, KL penalty included, whitened over the rollout."""
    returns = discounted_sum(token_rewards[loss_mask].double(), segment[loss_mask], gamma)
    return {
        "advantages": _spread(_whiten(returns) if whiten else returns, loss_mask),
        "returns": _spread(returns, loss_mask),
        "returns/mean": Stat.of(returns),
        **_advantage_stats(returns),
    }


def reinforce_pp_baseline(
    reward: Tensor, group: Tensor, loss_mask: Tensor, segment: Tensor, *, whiten: bool = True
) -> dict[str, Any]:
    """REINFORCE++-baseline (2501.03262): the reward minus its group's mean, whitened over the rollout's tokens."""
    groups = RewardGroups(reward, group)
    result = _outcome(groups.deviation, groups, loss_mask, segment)
    if whiten:
        result["advantages"] = _spread(_whiten(result["advantages"][loss_mask].double()), loss_mask)
    return result


def remax(reward: Tensor, baseline: Tensor, loss_mask: Tensor, segment: Tensor) -> dict[str, Any]:
    """ReMax (2310.10505): the reward minus that of the prompt's greedy response, the column ``baseline`` [N]."""
    advantages = (reward.double() - baseline.double())[segment[loss_mask]]
    stats = {"baseline/mean": Stat.of(baseline), **_advantage_stats(advantages)}
    return {"advantages": _spread(advantages, loss_mask), **stats}


def fixed_baseline(reward: Tensor, loss_mask: Tensor, segment: Tensor, *, baseline: float = 0.0) -> dict[str, Any]:
    """The reward minus a constant, the REINFORCE baseline c of TOPR (2503.14286).

    Off policy it decides how much right answers count beside wrong ones. Rewards 0 and 1 with ``baseline`` ½ are the
    paper's ±1 with c = 0, halved.
    """
    advantages = (reward.double() - baseline)[segment[loss_mask]]
    return {"advantages": _spread(advantages, loss_mask), **_advantage_stats(advantages)}


def gpg(
    reward: Tensor, group: Tensor, loss_mask: Tensor, segment: Tensor, *, scale: Literal["none", "std"] = "none"
) -> dict[str, Any]:
    """GPG (2504.02546): α times the reward minus its group's mean, with α = samples / samples of varied groups.

    Groups of equal rewards have no gradient and yet count in the mean over the batch; α takes them out again. After
    the filter `varied` α is 1. ``scale`` `std` also divides by the group's standard deviation (the paper's F_norm,
    which is 1 by default). verl's α counts rewards that are not 0 as the varied samples: another number.
    """
    groups = RewardGroups(reward, group)
    alpha = len(reward) / max(1, int(groups.size[~groups.equal].sum()))
    advantages = alpha * groups.deviation
    if scale == "std":
        advantages = advantages / (groups.std(unbiased=True)[groups.member] + 1e-6)
    return {**_outcome(advantages, groups, loss_mask, segment), "advantages/alpha": Stat(alpha)}


def opo(reward: Tensor, group: Tensor, loss_mask: Tensor, segment: Tensor) -> dict[str, Any]:
    """OPO (2505.23585): the reward minus the mean of its group that weighs rewards by the responses' lengths.

    A_i = r_i - Σ l_j r_j / Σ l_j, with l the trained tokens: the baseline of least variance, if the squared gradient
    of a response grows with its length. A response without trained tokens has weight 0.
    """
    groups = RewardGroups(reward, group)
    lengths = segment_count(segment[loss_mask], len(reward)).double()
    total = segment_sum(lengths, groups.member, len(groups.size)).clamp(min=1.0)
    # Averages deviations, not rewards, so that equal rewards have advantage 0 exactly.
    shift = segment_sum(lengths * groups.deviation, groups.member, len(groups.size)) / total
    return _outcome(groups.deviation - shift[groups.member], groups, loss_mask, segment)


def pass_at_k(
    reward: Tensor, group: Tensor, loss_mask: Tensor, segment: Tensor, *, k: int, solved: float = 1.0
) -> dict[str, Any]:
    """Pass@k training (2508.10751): a sample's mean advantage over all subsets of k samples of its group.

    A subset's reward is 1 if it holds a right answer (reward >= ``solved``). With n samples, w wrong ones, the mean
    m = 1 - C(w, k)/C(n, k) and the standard deviation s = √(m(1 - m)), a right answer gets (1 - m)/s and a wrong one
    (1 - m - C(w - 1, k - 1)/C(n - 1, k - 1))/s. A group in which all subsets fare alike gets 0, and so does one of
    fewer than k samples. With k = 1 this is GRPO with the population's standard deviation.

    Metrics: `pass@k`, the mean of m. ValueError for a k below 1, or above the size of every group.
    """
    groups = RewardGroups((reward >= solved).to(reward), group)
    largest = int(groups.size.max()) if len(groups.size) else k
    if not 1 <= k <= largest:
        raise ValueError(f"advantage.k is {k}: expected 1 to {largest}, the samples of the largest group")
    table = reward.new_zeros(len(groups.size), 2, dtype=torch.float64)  # advantages of (wrong, right) answers
    rates = reward.new_full((len(groups.size),), float("nan"), dtype=torch.float64)
    right = (groups.mean * groups.size).round().long().tolist()
    for i, (n, some) in enumerate(zip(groups.size.tolist(), right, strict=True)):
        if n < k:
            continue
        wrong = n - some
        missed = comb(wrong, k) / comb(n, k)
        rates[i] = 1 - missed
        if 0 < missed < 1:
            std = (missed * (1 - missed)) ** 0.5
            table[i, 0] = (missed - comb(wrong - 1, k - 1) / comb(n - 1, k - 1)) / std
            table[i, 1] = missed / std
    advantages = table[groups.member, (reward >= solved).long()]
    outcome = _outcome(advantages, groups, loss_mask, segment)
    return {**outcome, "pass@k": Stat.of(rates, ~rates.isnan())}


def gigpo(
    reward: Tensor,
    token_rewards: Tensor,
    turn_states: Tensor,
    group: Tensor,
    loss_mask: Tensor,
    segment: Tensor,
    *,
    scale: Literal["std", "none"] = "std",
    gamma: float = 0.95,
    turn_coef: float = 1.0,
    eps: float = 1e-6,
) -> dict[str, Any]:
    """GiGPO (2505.10978): episodes are compared within their group, and turns with others from the same state.

    A = A_episode + turn_coef · A_turn. A_episode is that of `group`. For A_turn, the return of a turn is the sum
    over its own and later turns of gamma^(turns between) times the turn's reward; turns of one group that begin in the
    same state (``turn_states``, i64[T]: its number at a turn's first token, else 0) are compared as episodes are. A
    turn whose state nobody else was in has A_turn = 0, as in verl-agent.

    ``token_rewards`` holds the rewards of turns at their tokens, the rest of the reward at the last one
    (shaping.shape_reward). ``scale``: `std`, or `none` (the paper's F_norm = 1).

    Metrics: `turns/alone`, the share of turns whose state nobody else was in, and `turns/group`, the mean size of the
    groups of turns. ValueError for a turn without a state.
    """

    def compare(groups: RewardGroups) -> Tensor:
        return groups.deviation / (groups.std(unbiased=True)[groups.member] + eps if scale == "std" else 1.0)

    episodes = RewardGroups(reward, group)
    sequence = segment[loss_mask]
    turn_number = (turn_states != 0).cumsum(0)[loss_mask]
    of_token = torch.unique_consecutive(torch.stack([sequence, turn_number]), dim=1, return_inverse=True)[1]
    turns = int(of_token[-1]) + 1 if len(of_token) else 0
    owner = torch.zeros(turns, dtype=torch.int64, device=segment.device).scatter_(0, of_token, sequence)
    state = torch.zeros_like(owner).index_add_(0, of_token, turn_states[loss_mask].long())  # one token a turn is not 0
    if missing := int((state == 0).sum()):
        raise ValueError(f"`turn_states` has no state of {missing} of {turns} turns: see Episode.anchor")
    rewards = segment_sum(token_rewards[loss_mask].double(), of_token, turns)
    state_group = torch.unique(torch.stack([group[owner], state]), dim=1, return_inverse=True)[1]
    alike = RewardGroups(discounted_sum(rewards, owner, gamma), state_group)
    advantages = compare(episodes)[sequence] + turn_coef * compare(alike)[of_token]
    return {
        "advantages": _spread(advantages, loss_mask),
        "groups/zero_std": Stat.of(episodes.equal),
        "groups/std": Stat.of(episodes.std(unbiased=False)),
        "turns/alone": Stat(float((alike.size == 1).sum()), float(turns)),
        "turns/group": Stat.of(alike.size),
        **_advantage_stats(advantages),
    }


def reverse_kl(
    rollout_logprobs: Tensor,
    ref_logprobs: Tensor,
    loss_mask: Tensor,
    segment: Tensor,
    *,
    coef: float = 1.0,
    discount: float = 0.0,
) -> dict[str, Any]:
    """On-policy distillation: -coef · (log π - log π_teacher) of each token that the student π sampled.

    The teacher's log-probs are the column ``ref_logprobs``. As an advantage in a policy gradient this descends KL(π ‖
    π_teacher) on the student's own responses (2306.13649 with the reverse divergence; Thinking Machines, "On-policy
    distillation", 2025). ``discount`` 0 credits a token with its own divergence only; 1 also with that of the rest of
    its response, which is the gradient of the whole sequence's divergence.

    Metrics: `teacher_kl`, nats per token, unbiased under the student.
    """
    log_ratio = rollout_logprobs[loss_mask].double() - ref_logprobs[loss_mask].double()
    advantages = discounted_sum(-coef * log_ratio, segment[loss_mask], discount)
    stats = {"teacher_kl": Stat.of(log_ratio), **_advantage_stats(advantages)}
    return {"advantages": _spread(advantages, loss_mask), **stats}


def _outcome(per_sequence: Tensor, groups: RewardGroups, loss_mask: Tensor, segment: Tensor) -> dict[str, Any]:
    advantages = per_sequence[segment[loss_mask]]
    return {
        "advantages": _spread(advantages, loss_mask),
        "groups/zero_std": Stat.of(groups.equal),
        "groups/std": Stat.of(groups.std(unbiased=False)),
        **_advantage_stats(advantages),
    }


def _advantage_stats(advantages: Tensor) -> dict[str, Stat]:
    """Statistics before whitening, after which they would be constant."""
    return {"advantages/mean": Stat.of(advantages), "advantages/abs": Stat.of(advantages.abs())}


def _whiten(values: Tensor) -> Tensor:
    """Mean 0, (population) variance 1; all 0 if they are all equal."""
    if not len(values):
        return values
    centred = values - values.mean()
    return centred / (centred.square().mean() + 1e-8).sqrt()


def _spread(values: Tensor, loss_mask: Tensor) -> Tensor:
    """f32[T]: the values at the positions of the trained tokens."""
    return torch.zeros(len(loss_mask), device=values.device).masked_scatter(loss_mask, values.float())
