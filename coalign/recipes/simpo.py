"""simpo"""

from coalign.runtime.offline import Offline


class SimPO(Offline):
    """Simple preference optimisation (2405.14734): length-normalised log-probs and a target margin, without a reference.

    Comparisons in, a policy out.
    """

    source = "preferences"
    defaults = {
        "loss": {"fn": "simpo"},
        "models": {"trainer": {"module": "fsdp", "optimizer": {"lr": 8e-7, "schedule": "cosine"}}},
    }
