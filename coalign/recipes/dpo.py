"""dpo"""

from coalign.runtime.offline import Offline


class DPO(Offline):
    """Direct preference optimisation (2305.18290) and the losses of its kind: `loss: {fn: dpo | ipo | …}`.

    Comparisons in, a policy out that prefers what was preferred, without a reward model.
    """

    source = "preferences"
    defaults = {
        "loss": {"fn": "dpo", "beta": 0.1},
        "models": {
            "trainer": {"module": "fsdp", "optimizer": {"lr": 5e-7, "schedule": "linear"}},
            "reference": {"module": "fsdp", "like": "trainer", "frozen": True},
        },
    }
