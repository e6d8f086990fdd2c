"""dpo

simpo

orpo

kto
"""

from coalign.data.transforms import mismatch, with_reference_point
from coalign.recipes.offline import Offline


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


class SimPO(Offline):
    """Simple preference optimisation (2405.14734): length-normalised log-probs and a target margin, without a reference.

    Comparisons in, a policy out.
    """

    source = "preferences"
    defaults = {
        "loss": {"fn": "simpo"},
        "models": {"trainer": {"module": "fsdp", "optimizer": {"lr": 8e-7, "schedule": "cosine"}}},
    }


class ORPO(Offline):
    """Odds ratio preference optimisation (2403.07691): likelihood and preference in one loss, without a reference.

    Comparisons in, a policy out.
    """

    source = "preferences"
    defaults = {
        "loss": {"fn": "orpo"},
        "models": {"trainer": {"module": "fsdp", "optimizer": {"lr": 8e-6, "schedule": "linear"}}},
    }


class KTO(Offline):
    """Kahneman-Tversky optimisation (2402.01306): single responses, each desirable or not.

    Labelled responses in, a policy out.

    The reference point z0 is how far the policy is from the reference on average, measured on responses that belong to
    other prompts of the same step. It needs a forward pass of both models with the weights of the moment.
    """

    source = "labelled"
    defaults = {
        "runtime": {"prompts_per_step": 32},
        "loss": {"fn": "kto", "beta": 0.1},
        "models": {
            "trainer": {"module": "fsdp", "optimizer": {"lr": 5e-7, "schedule": "linear"}},
            "reference": {"module": "fsdp", "like": "trainer", "frozen": True},
        },
    }

    @classmethod
    def check(cls, config):
        if config.runtime.prompts_per_step < 2:
            raise ValueError(
                "runtime.prompts_per_step is 1: the reference point of `kto` is measured on responses to other prompts "
                "of the step; use 2 or more (32 is usual)"
            )

    def prepare(self, batch):
        others = self.transform(mismatch, batch)
        scorers = self.trainer.forward_step(others, into="old_logprobs"), self.reference.forward_step(others)
        return self.transform(with_reference_point, batch, self.join(others, *scorers))
