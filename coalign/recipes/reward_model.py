"""Reward models from comparisons, and process reward models from judged steps."""

from coalign.recipes.offline import Offline


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


class ProcessReward(Offline):
    """Process reward modelling: a language model judges each step of a solution (2305.20050, 2312.08935).

    After every step the model predicts `+` or `-`; the prediction is read there and never becomes part of the text.
    Solutions with judged steps in, a language model that judges steps out.
    """

    source = "steps"
    defaults = {
        "loss": {"fn": "process_reward", "aggregation": "token_mean"},
        "models": {"trainer": {"module": "fsdp", "optimizer": {"lr": 1e-5, "schedule": "cosine", "min_lr_ratio": 0.1}}},
    }
