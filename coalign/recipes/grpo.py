"""grpo"""

from coalign.runtime.online import Online, need_several_samples
from coalign.runtime.reference import with_reference_where_read


class GRPO(Online):
    """Group Relative Policy Optimisation (2402.03300): the mean reward of a prompt's n samples is the baseline.

    Policy, reward and trainer, and a frozen reference where the loss asks for it (`loss.kl_coef` above 0).

    The divergence from the reference enters in the loss (k3 by default) and nowhere else: `kl` is refused.
    """

    defaults = {
        **Online.defaults,
        "runtime": {"samples_per_prompt": 8},
        "advantage": {"fn": "group"},
        "loss": {"fn": "policy_gradient", "kl_coef": 0.0, "aggregation": "token_mean"},
    }

    @classmethod
    def roles(cls, config):
        return with_reference_where_read(cls.models, config.loss)

    @classmethod
    def check(cls, config):
        need_several_samples(config)
        if config.kl:
            raise ValueError(
                f"kl: in `{config.algorithm}` the divergence from the reference is part of the loss; set loss.kl_coef "
                "and leave kl out"
            )
