"""reinforce_pp_baseline"""

from coalign.recipes.grpo import GRPO


class ReinforcePPBaseline(GRPO):
    """REINFORCE++ with a group baseline (2501.03262): deviations from the group's mean, whitened over the whole batch.

    Unlike GRPO it scales all groups by one standard deviation, so an easy prompt counts no more than a hard one.

    The divergence from the reference enters in the loss (k2).
    """

    defaults = {
        **GRPO.defaults,
        "advantage": {"fn": "reinforce_pp_baseline"},
        "loss": {"fn": "policy_gradient", "kl_coef": 0.001, "kl_estimator": "k2"},
    }
