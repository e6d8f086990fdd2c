"""The base of recipes that learn from a data set: no rollout, one trained model, perhaps a reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from coalign.cluster.batch_ref import BatchRef
from coalign.cluster.future import Future
from coalign.config.schema import RunConfig
from coalign.engine.engine import Engine
from coalign.engine.flow import AbsentScorer
from coalign.engine.reference import drop_unread_reference
from coalign.roles import Scorer, Trainable

if TYPE_CHECKING:
    from coalign.algorithms.objective import Objective
    from coalign.cluster.dist import DistModel
    from coalign.engine.reference import BaseWeights


class Offline(Engine):
    """Data set rows in, one trained model out; evaluation is the loss and its statistics on held-out rows.

    There is a ``reference`` if the loss reads its log-probs.
    """

    trainer: DistModel[Trainable]
    reference: DistModel[Scorer] | BaseWeights | AbsentScorer = AbsentScorer()

    models = {"trainer": Trainable, "reference": Scorer}
    evaluates = ("trainer", "reference")
    unread = ("reward", "truncated", "advantage", "covariance", "pairs", "kl")

    @classmethod
    def roles(cls, config: RunConfig, loss: Objective | None) -> Mapping[str, type]:
        return drop_unread_reference(cls.models, loss)

    def env_flow(self, batch: BatchRef) -> Any:
        """Add the reference's log-probs if the loss reads them. They do not depend on the weights that are trained."""
        return self.join(batch, self.reference.forward_step(batch)) if self.reference else batch

    def prepare(self, batch: BatchRef | Future) -> Any:
        """Add columns that depend on the current weights, right before a batch is trained or evaluated on."""
        return batch

    def train_flow(self, batch: BatchRef) -> Any:
        return self.trainer.train_step(self.prepare(batch))

    def eval_flow(self, batch: BatchRef) -> Any:
        return self.trainer.eval_step(self.prepare(self.env_flow(batch)))
