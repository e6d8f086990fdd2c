"""PPO with a value model, and GRPO with the feedback of a judge (RLAIF)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coalign.recipes.grpo import GRPO
from coalign.recipes.online import KLInReward
from coalign.roles import Rollout, Scorer, Trainable

if TYPE_CHECKING:
    from coalign.cluster.dist import DistModel


class PPO(KLInReward):
    """Proximal Policy Optimisation with a value model and a KL penalty per token (1707.06347, 2203.02155).

    Policy, reference, reward, trainer, and a value model that is trained beside the trainer. The divergence from the
    reference is only part of the reward (k1 per token), with a fixed or adaptive coefficient: `loss.kl_coef` above 0 is
    refused. With `models.trainer.learns_after: k` the value model trains alone for the first k steps.
    """

    value: DistModel[Trainable]

    models = {"policy": Rollout, "reference": Scorer, "reward": Scorer, "trainer": Trainable, "value": Trainable}
    scores = ("reference", "value", "reward")
    defaults = {
        **KLInReward.defaults,
        "runtime": {"samples_per_prompt": 1},
        "advantage": {"fn": "gae", "gamma": 1.0, "lam": 0.95},
        "kl": {"fn": "FixedKL", "coef": 0.05},
        "models": {
            **KLInReward.defaults["models"],
            "value": {
                "like": "trainer",
                "head": "value",
                "head_init": "zero",
                "learns_after": 0,
                "loss": {"fn": "value", "clip": 0.2},
            },
        },
    }

    def train_flow(self, batch):
        learned = self.apply(self.advantage, batch)
        return self.trainer.train_step(learned), self.value.train_step(learned)


class RLAIF(GRPO):
    """Reinforcement learning from AI feedback (2212.08073, 2309.00267): a language model judges the responses.

    GRPO whose reward is the verdict of the model `judge`, by default its grade. With `models.judge.judge: pairwise` it
    compares the responses to a prompt; with `module: preference` it does so by the probabilities of two labels, without
    generating text. Other reward terms go beside it: `reward: [{model: judge}, {fn: …}]`. Any other recipe can use a
    judge in the same way: `algorithm: online_dpo`, `reward: {model: judge}`.
    """

    defaults = {
        **GRPO.defaults,
        "reward": [{"model": "judge"}],
        "models": {
            **GRPO.defaults["models"],
            "judge": {
                "module": "judge",
                "frozen": True,
                "judge": {"fn": "pointwise"},
                "sampling": {"max_new_tokens": 512, "temperature": 0.0},
            },
        },
    }
