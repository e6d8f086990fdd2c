"""Whether the transport of weights that a configuration names can work where it places the models."""

from __future__ import annotations

from collections.abc import Mapping

from coalign.cluster.base import planned
from coalign.cluster.start import kind
from coalign.config.schema import ModelConfig, RunConfig
from coalign.runtime.engine import Engine


def check_transport(cls: type[Engine], models: Mapping[str, ModelConfig], config: RunConfig) -> None:
    """Refuse a transport between models whose placement it cannot serve. ValueError names both.

    What only a running cluster knows (hosts) the first sync finds.
    """
    name = config.sync.transport
    if name not in ("broadcast", "cuda_ipc"):
        return
    if kind(config) == "local":
        raise ValueError(
            f"sync.transport: `{name}` is for models in processes of their own, and here all of them run in this one; "
            "leave it out, or set runtime.cluster: ray"
        )
    slots = planned(models, config.runtime.colocation)
    for source, target in cls.sync:
        gpus = [slots[each].footprints[each].total for each in (source, target)]
        together = slots[source] is slots[target]
        if name == "broadcast" and together:
            raise ValueError(
                f"sync.transport: `broadcast` needs models.{source} and models.{target} at once, and in one group of "
                "runtime.colocation they take turns; use shared_memory, object_store or disk"
            )
        if name == "cuda_ipc" and not (together and gpus == [1, 1]):
            raise ValueError(
                f"sync.transport: `cuda_ipc` needs models.{source} and models.{target} on one GPU; they have {gpus[0]} "
                f"and {gpus[1]}, in {'one' if together else 'no common'} group of runtime.colocation; use shared_memory"
            )
