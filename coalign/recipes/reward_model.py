"""reward_model"""

from coalign.runtime.offline import Offline


class RewardModel(Offline):
    """Reward modelling: a scalar per response such that better ones score higher (Bradley-Terry; 2203.02155 for k > 2).

    Comparisons in, a model with a reward head out; reports the accuracy on held-out comparisons.
    """

    source = "preferences"
    defaults = {
        "loss": {"fn": "bradley_terry"},
        "models": {
            "trainer": {
                "module": "fsdp",
                "head": "reward",
                "head_init": "zero",
                "optimizer": {"lr": 1e-5, "schedule": "cosine", "min_lr_ratio": 0.1},
            }
        },
    }
