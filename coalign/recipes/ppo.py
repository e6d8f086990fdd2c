"""Proximal Policy Optimisation from a reward model or function (1707.06347, 2203.02155) with a per-token KL penalty."""

from coalign.algorithms.kl import AdaptiveKL, FixedKL
from coalign.algorithms.shaping import shape_reward
from coalign.config.functions import bind, resolve
from coalign.runtime.engine import Engine
from coalign.types import Rollout, Scorer, Trainable


class PPO(Engine):
    """Policy, reference, reward, trainer, and a value model that learns beside the trainer.

    The divergence from the reference enters in the reward (k1 per token), with a fixed or adaptive coefficient, and
    nowhere else: `loss.kl_coef` above 0 is refused.
    """

    models = {"policy": Rollout, "reference": Scorer, "reward": Scorer, "trainer": Trainable, "value": Trainable}
    sync = [("trainer", "policy")]
    defaults = {
        "runtime": {"samples_per_prompt": 1},
        "advantage": {"fn": "gae", "gamma": 1.0, "lam": 0.95},
        "kl": {"fn": "FixedKL", "coef": 0.05},
        "loss": {"fn": "policy_gradient"},
        "models": {
            "policy": {"module": "native"},
            "trainer": {"module": "fsdp", "like": "policy"},
            "reference": {"module": "fsdp", "like": "trainer", "frozen": True},
            "value": {"like": "trainer", "head": "value", "head_init": "zero", "loss": {"fn": "value", "clip": 0.2}},
        },
    }

    def __init__(self, config, cluster):
        super().__init__(config, cluster)
        controller = resolve(config.kl.fn, "coalign.algorithms.kl")
        self.kl: FixedKL | AdaptiveKL = controller(**bind(controller, config.kl.arguments, "kl"))

    @classmethod
    def check(cls, config):
        if config.loss.arguments.get("kl_coef", 0.0):
            raise ValueError(
                "loss.kl_coef: in `ppo` the KL penalty is part of the reward; set kl.coef and leave loss.kl_coef at 0, "
                "or the divergence is charged twice"
            )

    def env_flow(self, prompts):
        out = self.policy.generate(prompts)
        scorers = (self.reference, self.value, self.reward)
        return self.join(out, *[scorer.forward_step(out) for scorer in scorers])  # they run side by side

    def train_flow(self, batch):
        shaped = self.apply(self.advantage, self.apply(shape_reward, batch, kl_coef=self.kl.coef))
        return self.trainer.train_step(shaped, **self.ptx()), self.value.train_step(shaped)

    def after_step(self, stats):
        self.kl.update(stats["kl"].value, samples=int(stats["samples/count"].value))

    def state_dict(self):
        return self.kl.state_dict()

    def load_state_dict(self, state):
        self.kl.load_state_dict(state)
