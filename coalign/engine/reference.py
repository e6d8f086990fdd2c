"""Reference log-probs: whether a run needs them, and how they come without a second model in memory: from the frozen
weights beneath adapters, or from a cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from coalign.algorithms.traits import required_inputs
from coalign.cluster.future import BatchRef, Future
from coalign.config.functions import bind, resolve
from coalign.config.schema import LossConfig, ModelConfig
from coalign.roles import Trainable

if TYPE_CHECKING:
    from coalign.engine.engine import Engine
    from coalign.report.display import Display


def with_reference_where_read(roles: Mapping[str, type], loss: LossConfig | None) -> Mapping[str, type]:
    """``roles`` without `reference` unless ``loss`` reads its log-probs."""
    if loss is None:
        return roles
    fn = resolve(loss.fn, "coalign.algorithms.losses")
    read = required_inputs(fn, bind(fn, loss.arguments, "loss"))
    return {name: role for name, role in roles.items() if name != "reference" or "ref" in read}


class BaseWeights:
    """The weights beneath a model's adapters, as a scorer: ``forward_step`` with the adapters off."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def forward_step(self, batch: BatchRef | Future, *, into: str | None = None) -> Future:
        """See TrainableModule.forward_step."""
        return self.model.forward_step(batch, into=into, base=True)


def shared_bases(models: Mapping[str, ModelConfig], roles: Mapping[str, type]) -> dict[str, str]:
    """{frozen model: trained model whose adapters lie on the same weights}: the former need not be loaded.

    A model with a cache is left as it is: once filled, it costs neither memory nor time.
    """
    trained = [n for n in models if roles[n] is Trainable and models[n].lora and not models[n].lora.load]
    shared = {}
    for name in models:
        for other in trained:
            mine, its = models[name], models[other]
            plain = mine.frozen and not mine.cache and not (mine.lora and mine.lora.load)
            if plain and _weights(mine) == _weights(its):
                shared[name] = other
    return shared


def precompute(engine: Engine, display: Display) -> None:
    """Let every model that has a cache see all rows of the run's data once, then unload it."""
    cached = {n: model for n, model in engine.models_running.items() if model.config.cache}
    loaders = [engine.environment.loader, *([engine.evaluator.loader] if engine.evaluator else [])]
    if not cached:
        return
    with display.progress(f"log-probs of {', '.join(cached)}", sum(loader.rows for loader in loaders)) as advance:
        for rows in (rows for loader in loaders for rows in loader.all()):
            ref = engine.cluster.put(rows)
            for scored in [model.forward_step(ref) for model in cached.values()]:
                scored.result()
            advance(len(set(rows["group"].tolist())))
    for model in cached.values():
        model.unload().result()


def _weights(model: ModelConfig) -> tuple[Any, ...]:
    bits = model.lora.base_bits if model.lora else None
    sampled_at = model.sampling.temperature or 1.0
    return (model.module, model.load, model.init, model.head, model.dtype, model.compute_dtype, bits, sampled_at)
