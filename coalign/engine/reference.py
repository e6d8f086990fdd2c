"""Reference log-probs without a second model in memory: from the weights beneath adapters, or from a cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from coalign.cluster.batch_ref import BatchRef
from coalign.cluster.future import Future

if TYPE_CHECKING:
    from coalign.algorithms.objective import Objective
    from coalign.cluster.dist import DistModel
    from coalign.engine.engine import Engine
    from coalign.report.display import Display
    from coalign.roles import Trainable


def drop_unread_reference(roles: Mapping[str, type], loss: Objective | None) -> Mapping[str, type]:
    """Return ``roles`` without `reference` if ``loss`` does not read its log-probs."""
    if loss is None:
        return roles
    return {name: role for name, role in roles.items() if name != "reference" or "ref" in loss.needs}


class BaseWeights:
    """The weights beneath a model's adapters, as a scorer: ``forward_step`` with the adapters off."""

    def __init__(self, model: DistModel[Trainable]) -> None:
        self.model = model

    def forward_step(self, batch: BatchRef | Future, *, into: str | None = None) -> Future:
        """See TrainableModule.forward_step."""
        return self.model.forward_step(batch, into=into, base=True)


def precompute(engine: Engine, display: Display) -> None:
    """Fill the caches of all cached models with the rows of the run's data, then unload these models."""
    cached = {n: model for n, model in engine.running.items() if model.config.cache}
    loaders = [engine.environment.loader, *([engine.evaluator.loader] if engine.evaluator else [])]
    if not cached:
        return
    with display.progress(f"log-probs of {', '.join(cached)}", sum(loader.rows for loader in loaders)) as advance:
        for _, rows in (chunk for loader in loaders for chunk in loader.all()):
            ref = engine.cluster.put(rows)
            for scored in [model.forward_step(ref) for model in cached.values()]:
                scored.result()
            advance(len(set(rows["group"].tolist())))
    for model in cached.values():
        model.unload().result()
