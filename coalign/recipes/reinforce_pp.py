"""reinforce_pp"""

from coalign.runtime.online import KLInReward


class ReinforcePP(KLInReward):
    """REINFORCE++ (2501.03262): PPO's clipped objective on whitened returns, without a value model or groups.

    The divergence from the reference is charged at each token (k1): a token's return holds all that comes after it.

    One sample per prompt is enough.
    """

    defaults = {
        **KLInReward.defaults,
        "runtime": {"samples_per_prompt": 1},
        "advantage": {"fn": "reinforce_pp", "gamma": 1.0},
        "kl": {"fn": "FixedKL", "coef": 0.01},
    }
