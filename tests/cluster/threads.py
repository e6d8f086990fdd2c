"""A cluster of threads: models with several processes, on one machine and at once."""

from __future__ import annotations

from collections.abc import Mapping

from coalign.cluster.batch_ref import BatchRef, Meta
from coalign.cluster.dist import DistActor
from coalign.cluster.local import LocalCluster, LocalStore, LocalWorker
from coalign.cluster.placement.slots import Slot
from coalign.cluster.worker import Worker
from coalign.config.schema import ModelConfig, RunConfig, RuntimeConfig
from coalign.data.batch import Batch
from coalign.roles import Context

_STORE = LocalStore()


class ThreadCluster(LocalCluster):
    """Every process of a model is a thread of this one."""

    def _start(self, name: str, slot: Slot, threads: int | None, spmd: bool, exclusive: bool) -> list[DistActor]:
        kind = "rank" if spmd else "replica"
        ranks = [
            LocalWorker(f"{name}, {kind} {i}", Worker(self.store, threads), self.compute_thread(f"{name}-{i}"))
            for i in range(slot.footprints[name].processes)
        ]
        return [DistActor(ranks, "cpu")] if spmd else [DistActor([rank], "cpu") for rank in ranks]


def thread_cluster(models: Mapping[str, Mapping[str, object]], **runtime: object) -> ThreadCluster:
    """With these models (modules of tests.cluster.modules) running."""
    configs = {n: ModelConfig(**{**m, "module": f"tests.cluster.modules:{m['module']}"}) for n, m in models.items()}
    settings = RuntimeConfig(**({"threads": 1, "call_timeout": 60.0} | runtime))
    cluster = ThreadCluster(RunConfig(algorithm="none", models=configs, runtime=settings))
    for name, config in configs.items():
        cluster.spawn(name, config, Context(model=name, threads=1)).ready.result()
    return cluster


def store_batch(batch: Batch) -> BatchRef:
    """A reference to a batch in a store of this process."""
    return BatchRef.of(Meta.of(batch), _STORE.put(batch), _STORE)
