"""orpo"""

from coalign.runtime.offline import Offline


class ORPO(Offline):
    """Odds ratio preference optimisation (2403.07691): likelihood and preference in one loss, without a reference.

    Comparisons in, a policy out.
    """

    source = "preferences"
    defaults = {
        "loss": {"fn": "orpo"},
        "models": {"trainer": {"module": "fsdp", "optimizer": {"lr": 8e-6, "schedule": "linear"}}},
    }
