"""The cluster over Ray: one actor process for each rank, payloads in the object store. The only file that imports ray.

Columns are stored as numpy arrays, so a worker maps a payload instead of unpickling it, and copies its own rows out:
stored objects are shared by all readers and must not be written to.

Cores: Ray only counts them, the operating system shares them. Each process reserves the fraction with which all of them
fit into half of the cluster's cores (at most one core each): reservations spread processes over nodes, and no layout
can wait for a core. How many threads compute is set by ``threads`` alone.
"""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import ray
import torch
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import Tensor

from coalign.cluster.answers import Remote, Running
from coalign.cluster.base import Cluster
from coalign.cluster.dist import DistActor
from coalign.cluster.future import Meta
from coalign.cluster.slot import Slot, require
from coalign.cluster.worker import Worker
from coalign.config.schema import RunConfig
from coalign.data.batch import Batch, Column

PLACEMENT_SECONDS = 120.0  # how long the cluster may take to reserve a slot (autoscaling included)


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as numpy keeps it; dtypes that numpy lacks lie as integers of their size."""

    array: np.ndarray
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> Stored:
        tensor = tensor.detach().cpu().contiguous()
        raw = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
        return Stored(raw.numpy(), tensor.dtype)

    def rows(self, start: int, stop: int) -> Tensor:
        """A copy of some rows, which its owner may write to."""
        return torch.from_numpy(self.array[start:stop].copy()).view(self.dtype)


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A Batch as it lies in the object store."""

    lengths: np.ndarray
    token: Mapping[str, Stored]
    sequence: Mapping[str, Stored | list[Any]]

    @staticmethod
    def of(batch: Batch) -> StoredBatch:
        keep = lambda column: Stored.of(column) if isinstance(column, Tensor) else column  # noqa: E731
        return StoredBatch(
            batch.lengths.numpy(),
            {name: Stored.of(column) for name, column in batch.token.items()},
            {name: keep(column) for name, column in batch.sequence.items()},
        )

    def slice(self, start: int, stop: int) -> Batch:
        """Sequences start..stop-1, copied."""
        first, last = int(self.lengths[:start].sum()), int(self.lengths[:stop].sum())
        cut = lambda column: column.rows(start, stop) if isinstance(column, Stored) else column[start:stop]  # noqa: E731
        sequence: dict[str, Column] = {name: cut(column) for name, column in self.sequence.items()}
        return Batch(
            torch.from_numpy(self.lengths[start:stop].copy()),
            {name: column.rows(first, last) for name, column in self.token.items()},
            sequence,
        )


class RayStore:
    """Payloads in Ray's object store."""

    in_process = False

    def put(self, value: Any) -> ray.ObjectRef:
        return ray.put(stored(value))

    def get(self, ref: ray.ObjectRef) -> Any:
        return ray.get(ref)

    def rows(self, ref: ray.ObjectRef, start: int, stop: int) -> Batch:
        return ray.get(ref).slice(start, stop)


def stored(value: Any) -> Any:
    """A value in the form in which the object store shares it without copies."""
    return StoredBatch.of(value) if isinstance(value, Batch) else value


class Actor:
    """A worker in a process of its own."""

    def __init__(self, threads: int | None) -> None:
        self._worker = Worker(RayStore(), threads)

    def address(self) -> str:
        """host:port of this node with a port that is free now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    @ray.method(num_returns=2)
    def execute(self, verb: str, arguments: tuple[Any, ...]) -> tuple[Meta, Any]:
        meta, payload = self._worker.execute(verb, *arguments)
        return meta, stored(payload)


class RayWorker:
    """A handle to an Actor."""

    def __init__(self, where: str, actor: Any) -> None:
        self.where, self.actor = where, actor

    def execute(self, verb: str, *arguments: Any) -> Running:
        # In a tuple, so that Ray hands references on as they are: the worker fetches the rows it needs.
        meta, payload = self.actor.execute.remote(verb, arguments)
        return Running(self.where, meta.future(), payload)


class RayCluster(Cluster):
    """Models on a Ray cluster: the one at ``runtime.ray_address``, or one that starts here and ends with the run."""

    store = RayStore()

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        # Names are unique over all runs of a Ray cluster.
        self._run = f"{os.path.basename(os.path.normpath(config.output))}-{uuid.uuid4().hex[:6]}"
        self._threads = config.runtime.threads
        self._groups: dict[str, PlacementGroup] = {}
        self._actors: list[Any] = []
        self._starting = threading.Lock()  # nothing may start while everything is being ended
        self._owner = not ray.is_initialized()
        if self._owner:
            _connect(config.runtime.ray_address)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        # Two more than the configuration lists: rewards, and pure functions.
        processes = sum(footprint.processes for footprint in self.footprints.values()) + 2
        self._cpu = min(1.0, round(sum(node.get("CPU", 0.0) for node in nodes) / 2 / processes, 3))
        try:
            require(self.slots, [int(node.get("GPU", 0)) for node in nodes])
        except ValueError:
            self._kill()
            raise

    def _start(self, name: str, slot: Slot, threads: int | None, spmd: bool, exclusive: bool) -> list[DistActor]:
        group = self._group(slot)
        gpus = slot.gpus_of(name)
        ranks = []
        for process, place in enumerate(slot.places[name]):
            kind = "rank" if spmd else "replica"
            where = f"{name}, {kind} {process}"
            options = {
                "name": f"{self._run}:{name}:{kind}{process}",
                "num_gpus": gpus / slot.sharers,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group, place),
            }
            ranks.append(self._actor(where, threads, options))
        device = "cuda" if gpus else "cpu"
        if not spmd:
            return [DistActor([rank], device) for rank in ranks]
        meeting = ray.get(ranks[0].actor.address.remote()) if len(ranks) > 1 else None
        return [DistActor(ranks, device, meeting)]

    def _actor(self, where: str, threads: int | None, options: dict[str, Any]) -> RayWorker:
        # Ray would set OMP_NUM_THREADS to the cores reserved, and results depend on the number of threads.
        env = {"OMP_NUM_THREADS": str(threads)} if threads else {}
        named = type(options["name"], (Actor,), {})  # what `ps` and Ray's tools show
        remote = ray.remote(named).options(
            num_cpus=self._cpu, max_restarts=0, max_task_retries=0, runtime_env={"env_vars": env}, **options
        )
        with self._starting:
            if self.error:
                raise self.error
            actor = remote.remote(threads)
            self._actors.append(actor)
        return RayWorker(where, actor)

    def _group(self, slot: Slot) -> PlacementGroup:
        """The slot's reservation, made at its first use. Raises ValueError if the cluster does not grant it in time."""
        if slot.name not in self._groups:
            if slot.gpus > 1 and slot.sharers > 1:
                raise ValueError(
                    f"runtime.colocation: {slot.name} share {slot.gpus} GPUs in each process, and Ray divides single "
                    "GPUs only; give each model num_process equal to num_gpu, or devices of its own"
                )
            tenants = [sum(place in places for places in slot.places.values()) for place in range(slot.size)]
            bundles = [{"CPU": round(self._cpu * count, 4), "GPU": slot.gpus} for count in tenants]
            group = placement_group(
                bundles, strategy="PACK" if slot.gpus else "SPREAD", name=f"{self._run}:{slot.name}"
            )
            self._groups[slot.name] = group
            if not group.wait(PLACEMENT_SECONDS):
                raise ValueError(
                    f"{slot.name}: Ray did not reserve {bundles} within {PLACEMENT_SECONDS:g} s; "
                    f"free are {ray.available_resources()}"
                )
        return self._groups[slot.name]

    @cached_property
    def _functions(self) -> RayWorker:
        return self._actor("functions", self._threads, {"name": f"{self._run}:functions"})

    def _helper(self) -> Remote:
        return self._functions

    def _kill(self) -> None:
        """Also ends Ray itself if it was started here."""
        with self._starting:
            while self._actors:
                ray.kill(self._actors.pop())
            while self._groups:
                remove_placement_group(self._groups.popitem()[1])
            if self._owner:
                ray.shutdown()


def _connect(address: str | None) -> None:
    """Join the Ray cluster at ``address``; None: start one here."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's workers are nice by default: beside any other process of the machine they would hardly compute.
    os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        ray.init(address=address or "local", include_dashboard=False, namespace="coalign")
    except ConnectionError as error:
        raise ValueError(
            f"runtime.ray_address: no Ray cluster answers at {address}: {error.__cause__ or error}"
        ) from error
