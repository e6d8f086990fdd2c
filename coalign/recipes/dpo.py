"""Learning from judged data: DPO, SimPO and ORPO on comparisons, KTO on single responses, and reward models.

``RewardModel`` learns from comparisons, ``ProcessReward`` from judged steps.
"""

from coalign.engine.transforms import mismatch, with_reference_point
from coalign.recipes.offline import Offline


class DPO(Offline):
    """Direct preference optimisation (2305.18290) and its relatives: `loss: {fn: dpo | ipo | …}`.

    Comparisons in, a policy out that prefers the chosen responses, without a reward model.
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
    """SimPO (2405.14734): preference optimisation with length-normalised log-probs and a target margin.

    Comparisons in, a policy out, without a reference.
    """

    source = "preferences"
    defaults = {
        "loss": {"fn": "simpo"},
        "models": {"trainer": {"module": "fsdp", "optimizer": {"lr": 8e-7, "schedule": "cosine"}}},
    }


class ORPO(Offline):
    """ORPO (2403.07691): likelihood and odds-ratio preference in one loss.

    Comparisons in, a policy out, without a reference.
    """

    source = "preferences"
    defaults = {
        "loss": {"fn": "orpo"},
        "models": {"trainer": {"module": "fsdp", "optimizer": {"lr": 8e-6, "schedule": "linear"}}},
    }


class KTO(Offline):
    """Kahneman-Tversky optimisation (2402.01306): single responses, each desirable or not.

    Labelled responses in, a policy out. The reference point z0 is the mean divergence of the policy from the reference,
    measured on responses paired with other prompts of the same step, whose end is left out where both together are too
    long for a model. It takes a forward pass of both models with the current weights.
    """

    source = "labelled"
    min_rows = 2
    defaults = {
        "runtime": {"prompts_per_step": 32},
        "loss": {"fn": "kto", "beta": 0.1},
        "models": {
            "trainer": {"module": "fsdp", "optimizer": {"lr": 5e-7, "schedule": "linear"}},
            "reference": {"module": "fsdp", "like": "trainer", "frozen": True},
        },
    }

    @classmethod
    def check(cls, config, loss):
        runtime, why = config.runtime, "the reference point of `kto` is measured on responses to other prompts of the"
        if runtime.prompts_per_step < cls.min_rows:
            raise ValueError(f"runtime.prompts_per_step is 1: {why} step; use 2 or more (32 is usual)")
        if runtime.eval_prompts is not None and runtime.eval_prompts < cls.min_rows:
            raise ValueError(f"runtime.eval_prompts is 1: {why} batch; use 2 or more, or leave it out")

    def prepare(self, batch):
        assert self.reference, "the losses of this recipe read its log-probs"
        mismatched = self.transform(mismatch, batch, longest=self.plan.models["trainer"].context.sample_tokens)
        scorers = self.trainer.forward_step(mismatched, into="old_logprobs"), self.reference.forward_step(mismatched)
        return self.transform(with_reference_point, batch, self.join(mismatched, *scorers))


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
