"""A Ray cluster of several nodes on this machine, whose nodes a test adds and kills."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray.cluster_utils import Cluster

STORE = 80 * 2**20
SECONDS = 180.0  # that a node may take to come


class Machines:
    """A head and further nodes; ``chips`` stand for devices, and ``kind`` is Ray's label for what they are."""

    def __init__(self, cpus: int, chips: int = 0, kind: str = "old") -> None:
        self.cluster = Cluster(initialize_head=True, head_node_args=_describe(cpus, chips, kind))

    @property
    def address(self) -> str:
        return self.cluster.address

    def add(self, name: str, cpus: int = 1, chips: int = 0, kind: str = "old") -> Any:
        return self.cluster.add_node(wait=False, node_name=name, **_describe(cpus, chips, kind))

    def kill(self, node: Any) -> None:
        """Kill a node's raylet as a machine that is lost would: its processes end with it."""
        os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
        self.cluster.worker_nodes.discard(node)


def _describe(cpus: int, chips: int, kind: str) -> dict[str, Any]:
    labels = {"ray.io/accelerator-type": kind} if chips else {}
    return {"num_cpus": cpus, "object_store_memory": STORE, "resources": {"chip": chips}, "labels": labels}


@contextmanager
def start_machines(cpus: int, chips: int = 0) -> Iterator[Machines]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    machines = Machines(cpus, chips)
    try:
        yield machines
    finally:
        machines.cluster.shutdown()


def wait_until(condition: Any, seconds: float = SECONDS) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)
