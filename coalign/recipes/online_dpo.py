"""Direct preference optimisation on the policy's own responses, paired by their rewards (2402.04792)."""

from coalign.data.batch import Batch
from coalign.engine.flow import chain
from coalign.engine.reference import drop_unread_reference
from coalign.recipes.online import Online, require_several_samples


class OnlineDPO(Online):
    """Online DPO: samples responses, pairs them by reward, and trains with any pairwise loss.

    Policy, reward and trainer, and a frozen reference if the loss reads it. `pairs` selects which of a prompt's n
    responses are compared: `best_worst`, or `all_pairs` with different rewards. The divergence from the reference is
    only part of the loss (`loss.beta`).
    """

    scores = ("reward",)  # the reference scores only the compared responses, in train_flow
    unread = ("advantage", "covariance", "kl")
    defaults = {
        **Online.defaults,
        "runtime": {"samples_per_prompt": 4},
        "pairs": {"fn": "best_worst"},
        "loss": {"fn": "dpo", "beta": 0.1},
    }

    @classmethod
    def roles(cls, config, loss):
        return drop_unread_reference(cls.models, loss)

    @classmethod
    def check(cls, config, loss):
        require_several_samples(config)
        if loss is not None and not loss.compares:
            raise ValueError(
                f"loss.fn: `{loss.name}` gives a value per {loss.per} and compares no responses; use a pairwise loss "
                "(`dpo`, `ipo`, `simpo`, …)"
            )

    def add_preferences(self, batch):
        """Add the preferences that `pairs` computes from the rewards."""
        pairs = self.read_section("pairs")
        assert pairs is not None, "the recipe has a default"
        return self.apply(chain(self.read_section("truncated"), pairs, main=pairs), batch)

    def train_flow(self, batch):
        pairs = self.transform(compared, self.add_preferences(batch))
        return self.trainer.train_step(self.join(pairs, self.reference.forward_step(pairs)))


def compared(batch: Batch) -> Batch:
    """Select the responses that have a preference. ValueError for episodes of several rows, which are no responses."""
    if batch.episode is not None:
        raise ValueError(
            "`online_dpo` compares responses, and here are episodes of several rows (episode/rows): use an algorithm "
            "with advantages (grpo, rloo, ppo), or an environment that keeps its history (data.reasoning: keep)"
        )
    return batch.select(~batch["preference"].isnan())
