"""REINFORCE with a baseline: REINFORCE++, RLOO, ReMax and TOPR."""

import torch

from coalign.data.batch import Batch
from coalign.recipes.grpo import GRPO
from coalign.recipes.online import KLInReward, KLOfResponse, refuse_greedy, refuse_kl_in_reward, require_several_samples
from coalign.types import Status


class ReinforcePP(KLInReward):
    """REINFORCE++ (2501.03262): PPO's clipped objective on whitened returns, without a value model or groups.

    The divergence from the reference is charged at each token (k1), so a token's return includes that of later tokens.
    One sample per prompt is enough.
    """

    defaults = {
        **KLInReward.defaults,
        "runtime": {"samples_per_prompt": 1},
        "advantage": {"fn": "reinforce_pp", "gamma": 1.0},
        "kl": {"fn": "FixedKL", "coef": 0.01},
    }


class ReinforcePPBaseline(GRPO):
    """REINFORCE++ with a group baseline (2501.03262): deviations from the group's mean, whitened over the whole batch.

    Unlike GRPO it scales all groups by one standard deviation, so an easy prompt counts no more than a hard one. The
    divergence from the reference is part of the loss (k2).
    """

    defaults = {
        **GRPO.defaults,
        "advantage": {"fn": "reinforce_pp_baseline"},
        "loss": {"fn": "policy_gradient", "kl_coef": 0.001, "kl_estimator": "k2"},
    }


class RLOO(KLOfResponse):
    """REINFORCE leave-one-out (2402.14740): the baseline is the mean reward of the prompt's *other* samples.

    A response is one action: its whole divergence from the reference is subtracted from its reward, before the baseline
    is computed.
    """

    defaults = {
        **KLOfResponse.defaults,
        "runtime": {"samples_per_prompt": 4},
        "advantage": {"fn": "rloo"},
        "kl": {"fn": "FixedKL", "coef": 0.05},
        "loss": {"fn": "policy_gradient", "aggregation": "sequence_mean_token_sum"},
    }

    @classmethod
    def check(cls, config, loss):
        super().check(config, loss)
        require_several_samples(config)


class ReMax(KLOfResponse):
    """ReMax (2310.10505): the reward of the greedy response to a prompt is the baseline of its samples.

    Each prompt gets one more, greedy response, which is scored and not trained on. The divergence from the reference is
    subtracted from the rewards of the samples, not from their baseline.
    """

    defaults = {
        **KLOfResponse.defaults,
        "runtime": {"samples_per_prompt": 1},
        "advantage": {"fn": "remax"},
        "kl": {"fn": "FixedKL", "coef": 0.01},
        "loss": {"fn": "policy_gradient", "aggregation": "sequence_mean_token_sum"},
    }

    @classmethod
    def check(cls, config, loss):
        super().check(config, loss)
        refuse_greedy(config)

    def env_flow(self, prompts):
        out = self.policy.generate(prompts)
        scored = self.add_scores(out)  # first: the baseline is normalised by the moments of these samples
        greedy = self.policy.generate(self.transform(_prompts_of, out), samples=1, temperature=0.0)
        greedy = self.join(greedy, self.reward.forward_step(greedy, into="baseline"))
        return self.transform(_with_baseline, scored, greedy)


class TOPR(GRPO):
    """Tapered Off-Policy REINFORCE (2503.14286): for batches of many updates, replay and old samples.

    Right answers are learned as in supervised training; wrong ones are unlearned while the policy still gives them. The
    baseline is a constant (½: for rewards 0 and 1); `advantage: group` takes the mean of the group.
    """

    defaults = {
        **GRPO.defaults,
        "advantage": {"fn": "fixed_baseline", "baseline": 0.5},
        "loss": {"fn": "topr", "aggregation": "sequence_mean_token_sum"},
    }

    @classmethod
    def check(cls, config, loss):
        refuse_kl_in_reward(config)  # one sample of a prompt is enough


def _prompts_of(samples: Batch) -> Batch:
    """Return the prompt of each group."""
    group = samples["group"].tolist()
    first = samples.select([i for i in range(len(group)) if i == 0 or group[i] != group[i - 1]])
    position = torch.arange(first.tokens_total) - first.offsets[first.segment]
    tokens = first["tokens"][position < first["prompt_length"][first.segment]]
    sequence = {name: first[name] for name in ("group", "rows")}
    return Batch(first["prompt_length"].long(), {"tokens": tokens}, sequence)


def _with_baseline(samples: Batch, greedy: Batch) -> Batch:
    """Add the column ``baseline``: the reward of the greedy response of the sample's group.

    Samples of a group without one (its reward failed) cannot be compared and become ERROR.
    """
    baselines = dict(zip(greedy["group"].tolist(), greedy["baseline"].tolist(), strict=True))
    baseline = torch.tensor([baselines.get(group, float("nan")) for group in samples["group"].tolist()])
    status = samples["status"].masked_fill(baseline.isnan(), int(Status.ERROR))
    return samples.with_(baseline=baseline, status=status)
