"""Calls plain functions on every node of a Ray cluster, each in a process of its own: what `coalign doctor` needs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from coalign.cluster.ray.connection import connect

Value = TypeVar("Value")
CLOCK_CALLS = 5  # the quickest one tells a clock's offset best


class _NodeProcess:
    """A process on one node that calls functions on request."""

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


class RayNodes:
    """The nodes of a Ray cluster that are alive, by their names, with a process on each. A context manager.

    ``addresses`` has the address of each, ``devices`` counts its devices (``resource``). The processes see all devices
    of their node. Raises ValueError if no cluster answers at the address, or if it asks for another token than the one
    here.
    """

    def __init__(self, address: str, resource: str = "GPU") -> None:
        self._is_joined = ray.is_initialized()
        if not self._is_joined:
            connect(address)
        self.devices: dict[str, int] = {}
        self.addresses: dict[str, str] = {}
        self._processes: dict[str, Any] = {}
        alive = [node for node in ray.nodes() if node["Alive"]]
        names = [node["NodeName"] for node in alive]
        for node in sorted(alive, key=lambda node: (node["NodeName"], node["NodeID"])):
            name = node["NodeName"] + (f"#{node['NodeID'][:4]}" if names.count(node["NodeName"]) > 1 else "")
            self.addresses[name] = node["NodeManagerAddress"]
            self.devices[name] = int(node["Resources"].get(resource, 0))
            on_node = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            # Ray hides all devices from a process that reserves none, unless it is told not to.
            shown = {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}
            options = {"num_cpus": 0, "max_concurrency": 4, "scheduling_strategy": on_node, "runtime_env": shown}
            self._processes[name] = ray.remote(_NodeProcess).options(**options).remote()

    def __enter__(self) -> RayNodes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            ray.kill(process)
        if not self._is_joined:
            ray.shutdown()

    @property
    def names(self) -> list[str]:
        return list(self._processes)

    def call(
        self, function: Callable[..., Value], arguments: Mapping[str, Sequence[Any]], seconds: float
    ) -> dict[str, Value | Exception]:
        """Call ``function`` at once on each node that ``arguments`` names; its result, or the error, by node."""
        tasks = {name: self._processes[name].call.remote(function, *values) for name, values in arguments.items()}
        ray.wait(list(tasks.values()), num_returns=len(tasks), timeout=seconds)
        results: dict[str, Value | Exception] = {}
        for name, task in tasks.items():
            try:
                results[name] = ray.get(task, timeout=0)
            except GetTimeoutError:
                results[name] = TimeoutError(f"no answer within {seconds:g} s")
            except RayError as error:
                cause = getattr(error, "cause", None)  # what the function raised
                results[name] = cause if isinstance(cause, Exception) else error
        return results

    def measure_clocks(self, seconds: float) -> dict[str, float]:
        """Seconds by which the clock of each node that answers is ahead of the clock here, within half of a call."""
        offsets: dict[str, float] = {}

        def ask(name: str) -> None:
            samples: list[tuple[float, float]] = []
            for _ in range(CLOCK_CALLS):
                start = time.time()
                there = cast(float, ray.get(self._processes[name].call.remote(time.time), timeout=seconds))
                samples.append((time.time() - start, there - (start + time.time()) / 2))
            offsets[name] = min(samples)[1]

        threads = [threading.Thread(target=_survive, args=(ask, name), daemon=True) for name in self._processes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds)
        return dict(offsets)


def _survive(ask: Callable[[str], None], name: str) -> None:
    try:
        ask(name)
    except (RayError, GetTimeoutError):
        return  # another check says that this node does not answer
