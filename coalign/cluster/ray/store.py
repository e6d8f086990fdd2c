"""Payloads in Ray's object store: batches as numpy arrays, and how full the store is.

A worker maps a payload instead of unpickling it, and copies its own rows out, since stored objects are shared by all
readers and must not be written to.
"""

from __future__ import annotations

import concurrent.futures
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import grpc
import numpy as np
import ray
import torch
from ray._private.internal_api import node_stats
from ray._private.state import state
from ray.exceptions import ObjectLostError, ObjectStoreFullError, OutOfDiskError, RayActorError
from torch import Tensor

from coalign.cluster.future import PayloadLost
from coalign.cluster.ray.connection import find_own_node
from coalign.cluster.ray.space import RayStoreError, StoreSpace
from coalign.data.batch import Batch, Column
from coalign.threads import begin_in_thread

log = logging.getLogger(__name__)
GCS_SECONDS = 60.0  # how long Ray's control store (GCS) may take to say which nodes there are
STORE_SECONDS = 1800.0  # how long an object store may take to give or take a payload
FULL_SECONDS = 120.0  # the same, while it can spill nothing more: Ray waits for ever for a payload that was not stored
LOOK_SECONDS = 15.0  # between two checks of a store that has not answered
WATCH_SECONDS = 30.0  # between two checks of the bytes that stores have spilled
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class _NumpyColumn:
    """A column as a numpy array; a dtype that numpy lacks is stored as integers of its size."""

    array: np.ndarray
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> _NumpyColumn:
        tensor = tensor.detach().cpu().contiguous()
        raw = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
        return _NumpyColumn(raw.numpy(), tensor.dtype)

    def rows(self, index: np.ndarray | slice) -> Tensor:
        """Copy some rows; the copy may be written to."""
        rows = self.array[index]
        return torch.from_numpy(rows.copy() if isinstance(index, slice) else rows).view(self.dtype)


@dataclass(frozen=True, slots=True)
class NumpyBatch:
    """A Batch whose tensors are numpy arrays."""

    lengths: np.ndarray
    token: Mapping[str, _NumpyColumn]
    sequence: Mapping[str, _NumpyColumn | list[Any]]

    @staticmethod
    def of(batch: Batch) -> NumpyBatch:
        return NumpyBatch(
            batch.lengths.numpy(),
            {name: _NumpyColumn.of(column) for name, column in batch.token.items()},
            {name: _NumpyColumn.of(c) if isinstance(c, Tensor) else c for name, c in batch.sequence.items()},
        )

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays; what lists hold is not counted."""
        columns = (*self.token.values(), *self.sequence.values())
        return self.lengths.nbytes + sum(column.array.nbytes for column in columns if isinstance(column, _NumpyColumn))

    def select(self, rows: np.ndarray) -> Batch:
        """Copy the sequences ``rows`` (i64), in this order."""
        lengths, ends = self.lengths[rows], self.lengths.cumsum()
        starts = ends[rows] - lengths
        # Token t comes from where its row starts, plus its distance from where the row starts in the result.
        moved = starts - lengths.cumsum() + lengths
        is_contiguous = len(rows) > 0 and bool((moved == moved[0]).all())
        total = lengths.sum()
        tokens = slice(starts[0], starts[0] + total) if is_contiguous else moved.repeat(lengths) + np.arange(total)
        sequence: dict[str, Column] = {
            name: column.rows(rows) if isinstance(column, _NumpyColumn) else [column[i] for i in rows]
            for name, column in self.sequence.items()
        }
        return Batch(
            torch.from_numpy(lengths), {name: column.rows(tokens) for name, column in self.token.items()}, sequence
        )


def to_numpy(value: Any) -> Any:
    """Convert a Batch into a NumpyBatch; other values are returned unchanged."""
    return NumpyBatch.of(value) if isinstance(value, Batch) else value


class RayStore:
    """Keeps payloads in Ray's object store."""

    in_process = False

    def put(self, value: Any) -> ray.ObjectRef:
        return _use_store(partial(ray.put, to_numpy(value)))

    def get(self, ref: ray.ObjectRef) -> Any:
        return _use_store(partial(ray.get, ref))

    def rows(self, ref: ray.ObjectRef, rows: np.ndarray) -> Batch:
        return self.get(ref).select(rows)


def measure_store(node: Mapping[str, Any]) -> StoreSpace:
    """Ask a node for the state of its store. grpc.RpcError if it does not answer within 30 s."""
    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False).store_stats
    spilling = json.loads(state.get_system_config().get("object_spilling_config") or "{}")
    return StoreSpace(
        node["NodeName"],
        stats.object_store_bytes_avail,  # despite its name the size of the store, not its free bytes
        stats.spilled_bytes_total,
        spilling.get("params", {}).get("directory_path", ""),
    )


def watch_stores(ended: threading.Event) -> None:
    """Log once for each node that its store has begun to spill, which makes every batch slower."""
    reported: set[str] = set()
    while not ended.wait(WATCH_SECONDS):
        try:
            for node in [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in reported]:
                if (space := measure_store(node)).spilled:
                    reported.add(node["NodeID"])
                    log.warning("%s", space.describe_spilling())
        except Exception as problem:  # Ray has ended, or a node does not answer: calls will say so
            log.debug("the stores of Ray were not measured: %s", problem)


def _use_store(action: Callable[[], Value]) -> Value:
    """Put or get a payload. RayStoreError if the store is full, gone, or does not answer; PayloadLost.

    Ray's own deadlines do not hold while a raylet is stopped, so a thread acts and this one waits.
    """
    done = begin_in_thread(action, "coalign-ray-store")
    start = time.monotonic()
    while True:
        if concurrent.futures.wait([done], LOOK_SECONDS).done:
            try:
                return done.result()
            except (OutOfDiskError, ObjectStoreFullError) as full:
                raise RayStoreError(measure_store(find_own_node()).describe()) from full
            except (ObjectLostError, RayActorError) as lost:  # its node is lost, or the process that computes it
                raise PayloadLost(str(lost).strip().partition("\n")[0]) from lost
        seconds = time.monotonic() - start
        asking = begin_in_thread(find_own_node, "coalign-ray-node")
        if not concurrent.futures.wait([asking], GCS_SECONDS).done:
            raise RayStoreError(f"Ray's control store (GCS) has not answered for {GCS_SECONDS:g} s: is it stopped?")
        node = asking.result()
        store = f"the object store of Ray on node {node['NodeName']}"
        if not node["Alive"]:
            raise RayStoreError(f"{store} is lost: its raylet is stopped, has ended, or cannot be reached")
        if seconds > STORE_SECONDS:
            raise RayStoreError(f"{store} has not answered for {seconds:.0f} s; look at its raylet and at `ray memory`")
        with suppress(grpc.RpcError):  # one that does not answer has its own deadline
            if seconds > FULL_SECONDS and not (space := measure_store(node)).count_spillable():
                raise RayStoreError(space.describe())
