"""Direct preference optimisation on the policy's own responses, paired by their rewards (2402.04792)."""

from functools import partial

from coalign.algorithms.traits import value_unit
from coalign.config.functions import bind, resolve
from coalign.data.batch import Batch
from coalign.engine.reference import with_reference_where_read
from coalign.recipes.online import Online


class OnlineDPO(Online):
    """Online DPO: samples responses, pairs them by reward, and trains with any pairwise loss.

    Policy, reward and trainer, and a frozen reference if the loss reads it. `pairs` selects which of a prompt's n
    responses are compared: `best_worst`, or `all_pairs` with different rewards. The divergence from the reference is
    only part of the loss (`loss.beta`).
    """

    scores = ("reward",)  # the reference reads only what is compared
    unread = ("advantage", "kl")
    defaults = {
        **Online.defaults,
        "runtime": {"samples_per_prompt": 4},
        "pairs": {"fn": "best_worst"},
        "loss": {"fn": "dpo", "beta": 0.1},
    }

    def __init__(self, config, cluster):
        super().__init__(config, cluster)
        fn = resolve(config.pairs.fn, "coalign.algorithms.comparisons")
        self.pairs = partial(fn, **bind(fn, config.pairs.arguments, "pairs"))

    @classmethod
    def roles(cls, config):
        return with_reference_where_read(cls.models, config.loss)

    @classmethod
    def check(cls, config):
        if config.runtime.samples_per_prompt == 1:
            raise ValueError(
                "runtime.samples_per_prompt is 1: the responses to one prompt are compared with each other; use 2 or "
                "more (4 is usual)"
            )
        unit = value_unit(resolve(config.loss.fn, "coalign.algorithms.losses"))
        if unit not in ("group", "batch"):
            raise ValueError(
                f"loss.fn: `{config.loss.fn}` gives a value per {unit} and compares no responses; use a pairwise loss "
                "(`dpo`, `ipo`, `simpo`, …)"
            )

    def train_flow(self, batch):
        pairs = self.transform(compared, self.apply(self.pairs, self.shaped(batch)))
        if hasattr(self, "reference"):
            pairs = self.join(pairs, self.reference.forward_step(pairs))
        return self.trainer.train_step(pairs, **self.ptx())


def compared(batch: Batch) -> Batch:
    """The responses that have a preference."""
    return batch.select(~batch["preference"].isnan())
