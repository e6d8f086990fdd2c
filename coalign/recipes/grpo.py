"""Group Relative Policy Optimisation (2402.03300): the mean reward of a prompt's n samples is the baseline."""

from coalign.runtime.engine import Engine
from coalign.runtime.offline import with_reference_where_read
from coalign.types import Rollout, Scorer, Trainable


class GRPO(Engine):
    """Policy, reward and trainer, and a frozen reference where the loss asks for it (`loss.kl_coef` above 0).

    The divergence from the reference enters in the loss (k3 by default) and nowhere else. Other members of the family
    are settings: `advantage: {fn: rloo}`, `loss: {clip_high: 0.28, aggregation: …}`.
    """

    models = {"policy": Rollout, "reward": Scorer, "reference": Scorer, "trainer": Trainable}
    sync = [("trainer", "policy")]
    defaults = {
        "runtime": {"samples_per_prompt": 8},
        "advantage": {"fn": "group"},
        "loss": {"fn": "policy_gradient", "kl_coef": 0.0, "aggregation": "token_mean"},
        "models": {
            "policy": {"module": "native"},
            "trainer": {"module": "fsdp", "like": "policy"},
            "reference": {"module": "fsdp", "like": "trainer", "frozen": True},
        },
    }

    @classmethod
    def roles(cls, config):
        return with_reference_where_read(cls.models, config.loss)

    @classmethod
    def check(cls, config):
        if config.runtime.samples_per_prompt == 1:
            raise ValueError(
                "runtime.samples_per_prompt is 1: a group baseline compares the samples of one prompt, "
                "and with one sample every advantage is 0; use 2 or more (8 is usual), or the recipe `ppo`"
            )

    def env_flow(self, prompts):
        out = self.policy.generate(prompts)
        scorers = [getattr(self, name) for name in ("reference", "reward") if hasattr(self, name)]
        return self.join(out, *[scorer.forward_step(out) for scorer in scorers])  # they run side by side

    def train_flow(self, batch):
        return self.trainer.train_step(self.apply(self.advantage, batch), **self.ptx())
