"""GRPO and its relatives: the samples of a prompt are compared with each other."""

from functools import partial

from coalign.algorithms.shaping import shape_reward
from coalign.engine.reference import drop_unread_reference
from coalign.recipes.online import Online, refuse_kl_in_reward, require_several_samples


class GRPO(Online):
    """Group Relative Policy Optimisation (2402.03300): the mean reward of a prompt's n samples is the baseline.

    Policy, reward and trainer, and a frozen reference if the loss needs it (`loss.kl_coef` above 0). The divergence
    from the reference is only part of the loss (k3 by default): `kl` is refused.
    """

    defaults = {
        **Online.defaults,
        "runtime": {"samples_per_prompt": 8},
        "advantage": {"fn": "group"},
        "loss": {"fn": "policy_gradient", "kl_coef": 0.0, "aggregation": "token_mean"},
    }

    def env_flow(self, prompts):
        out = self.policy.generate(prompts)
        return self.join(out, self.reference.forward_step(out), self.reward.forward_step(out))  # side by side

    def train_flow(self, batch):
        return self.trainer.train_step(self.apply(self.advantage, batch))

    @classmethod
    def roles(cls, config, loss):
        return drop_unread_reference(cls.models, loss)

    @classmethod
    def check(cls, config, loss):
        require_several_samples(config)
        refuse_kl_in_reward(config)


class DrGRPO(GRPO):
    """Dr. GRPO (2503.20783): GRPO without the two divisions that favour easy prompts and long wrong answers.

    A group's advantages are not divided by its standard deviation, nor a response's sum by its own length. That sum is
    divided by a constant instead: the response's token limit.
    """

    defaults = {
        **GRPO.defaults,
        "advantage": {"fn": "group", "scale": "none"},
        "loss": {
            "fn": "policy_gradient",
            "aggregation": "constant",
            "constant_length": "${models.policy.sampling.max_new_tokens}",
        },
        "models": {**GRPO.defaults["models"], "policy": {"module": "native", "sampling": {"max_new_tokens": 256}}},
    }


class DAPO(GRPO):
    """DAPO (2503.14476): GRPO with clip-higher, token mean, dynamic sampling and overlong filtering.

    `filter` drops prompts whose samples all earn the same, and `truncated` takes truncated responses out of the loss.
    The soft punishment of long responses is one more reward function: `length_penalty`.
    """

    defaults = {
        **GRPO.defaults,
        "filter": {"fn": "varied"},
        "truncated": {"fn": "mask_truncated"},
        "loss": {"fn": "policy_gradient", "clip_low": 0.2, "clip_high": 0.28, "aggregation": "token_mean"},
    }


class GSPO(GRPO):
    """Group Sequence Policy Optimisation (2507.18071): one clipped importance ratio per response.

    `loss.form: token` is GSPO-token. The clip range is far below PPO's, because the ratio is a mean over the response.
    """

    defaults = {**GRPO.defaults, "loss": {"fn": "gspo", "aggregation": "sequence_mean_token_mean"}}


class CISPO(GRPO):
    """CISPO (2506.13585): the importance weight is clipped, and no token loses its gradient to the clip.

    REINFORCE with group advantages, a bounded weight on each token, and the mean over all tokens of the batch.
    """

    defaults = {**GRPO.defaults, "loss": {"fn": "cispo", "aggregation": "token_mean"}}


class SAPO(GRPO):
    """SAPO (2511.20347): a soft gate of each token's ratio in place of the clip."""

    defaults = {**GRPO.defaults, "loss": {"fn": "sapo", "aggregation": "sequence_mean_token_mean"}}


class GMPO(GRPO):
    """Geometric-Mean Policy Optimization (2507.20673): one ratio per response, the geometric mean of clipped ratios."""

    defaults = {**GRPO.defaults, "loss": {"fn": "gmpo", "aggregation": "sequence_mean_token_mean"}}


class ClipCov(GRPO):
    """Clip-Cov (2505.22617): a few tokens that would lower the entropy most get no gradient."""

    defaults = {**GRPO.defaults, "covariance": {"fn": "clip_cov"}}


class KLCov(GRPO):
    """KL-Cov (2505.22617): a penalty holds the tokens back that would lower the entropy most; there is no clip."""

    defaults = {**GRPO.defaults, "covariance": {"fn": "kl_cov"}, "loss": {"fn": "kl_cov", "aggregation": "token_mean"}}


class GPG(GRPO):
    """Group Policy Gradient (2504.02546): REINFORCE with group baselines, without ratio, clip or reference.

    Groups without a gradient are taken out of the mean. The paper also asks for more prompts when few groups are left:
    that is `filter: varied`.
    """

    defaults = {**GRPO.defaults, "advantage": {"fn": "gpg"}, "loss": {"fn": "reinforce", "aggregation": "token_mean"}}


class OPO(GRPO):
    """OPO (2505.23585): a baseline of least variance, and one update per batch, exactly on policy.

    Neither divergence nor entropy is part of the loss.
    """

    defaults = {
        **GRPO.defaults,
        "advantage": {"fn": "opo"},
        "loss": {"fn": "policy_gradient", "aggregation": "sequence_mean_token_sum"},
    }


class GiGPO(GRPO):
    """Group-in-Group Policy Optimization (2505.10978): also turns are compared, with others from the same state.

    For environments (`rollout`): the state before a turn is the text that the policy reads then, or the name that the
    environment gives it (Episode.anchor). Rewards of turns count at their turns.
    """

    defaults = {
        **GRPO.defaults,
        "rollout": {"fn": "game"},
        "reward": [{"fn": "episode"}],
        "advantage": {"fn": "gigpo"},
    }

    @classmethod
    def check(cls, config, loss):
        super().check(config, loss)
        if not config.rollout.has_episodes:
            raise ValueError(
                f"rollout.fn is 'single_turn': `{config.algorithm}` compares the turns of episodes; name an environment"
                " (`tool_use`, `game`, …), or use `grpo`"
            )

    @property
    def shaping(self):
        """Rewards per token: a turn's where it was given."""
        return partial(shape_reward, kl_coef=0.0, turn_weight=self.plan.turn_weight)
