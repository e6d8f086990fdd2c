"""Decides which components of which models are on the devices, and moves those there that a call needs.

The driver decides and keeps count, workers move (coalign.memory, or a generator by its own means). What a process
has on its device is what it reported after its last call. With a known capacity a component leaves only if a call has
no memory otherwise, and the components of a later call are prefetched where they fit. Without one, the models of a
position take turns.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from coalign.cluster.batch_ref import DeviceMemoryUse, Meta
from coalign.cluster.future import CallDeadlines, Future, WorkerHandle, WorkerTask, wait
from coalign.cluster.placement.slots import Slot, list_movable_parts
from coalign.config.schema import ModelConfig
from coalign.types import Max, Stats, Total

GROWTH = 1.25  # memory kept free for a call, relative to its peak so far: it grows with the samples
EVICTION_ORDER = ("optimizer", "gradients", "kv", "weights")  # first the components that the fewest calls need
SlotPosition = tuple[str, int]  # (slot, index in it)
Sizes = Mapping[str, int]  # bytes by component


@dataclass(eq=False)
class _ResidentModel:
    """One process of a model: components ``on_device``, and those ``on_host`` with the bytes they would need there.

    ``movable``: the components that may leave the device. ``extra``: by method, the most bytes that a call took beyond
    those in use before it.
    """

    model: str
    positions: tuple[SlotPosition, ...]
    worker: WorkerHandle
    movable: frozenset[str]
    on_device: Sizes = field(default_factory=dict)
    on_host: Sizes = field(default_factory=dict)
    extra: dict[str, int] = field(default_factory=dict)
    process_models: Collection[str] = ()  # models in its process's report
    limit: int | None = None  # bytes that the process may use, as last sent to it
    last_call: int = 0  # number of its last call
    fetch: WorkerTask | None = None  # the move of components that an announced call needs
    eviction: WorkerTask | None = None  # the move of components to the host

    @property
    def size(self) -> float:
        """Bytes on each of its devices."""
        return sum(self.on_device.values()) / len(self.positions)

    def missing(self, components: Iterable[str]) -> list[str]:
        return [component for component in components if component in self.on_host]


class Residency:
    """Manages the device memory of every slot from which components may leave.

    With a ``capacity`` (bytes of one position) it manages all slots with devices; if there are none, CPU slots stand
    for them. A move may take as long as the call that it is for.
    """

    def __init__(
        self,
        slots: Mapping[str, Slot],
        models: Mapping[str, ModelConfig],
        capacity: int | None,
        deadlines: CallDeadlines,
    ) -> None:
        self.capacity = capacity
        self.deadlines = deadlines
        self.movable = {
            name: list_movable_parts(models[name], slot.footprints[name].devices, len(slot.positions) > 1)
            for name, slot in slots.items()
        }
        limited = [slot for slot in slots.values() if slot.devices] or list(slots.values())
        leaves = [slot for name, slot in slots.items() if self.movable[name] and len(slot.positions) > 1]
        self.slots = {slot.name for slot in ([] if capacity is None else limited) + leaves}
        self._residents: dict[str, list[_ResidentModel]] = {}
        self._by_position: dict[SlotPosition, list[_ResidentModel]] = {}
        self._by_name: dict[str, _ResidentModel] = {}
        self._computing: dict[SlotPosition, tuple[_ResidentModel, str]] = {}
        self._numbers = count(1)
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._peak = self._waited = 0.0
        self._lock = threading.Lock()

    def add(self, model: str, slot: Slot, workers: Sequence[WorkerHandle]) -> None:
        """Register the processes of a model; does nothing if its slot is not managed."""
        if slot.name not in self.slots:
            return
        self._residents[model] = []
        for indices, worker in zip(slot.positions[model], workers, strict=True):
            positions = tuple((slot.name, index) for index in indices)
            resident = _ResidentModel(model, positions, worker, self.movable[model])
            self._residents[model].append(resident)
            self._by_name[worker.name] = resident
            for position in resident.positions:
                self._by_position.setdefault(position, []).append(resident)

    def replace(self, former: str, worker: WorkerHandle) -> None:
        """Replace the process named ``former`` by a new one, which has nothing on its devices."""
        resident = self._by_name.pop(former, None)
        if resident is not None:
            self._by_name[worker.name] = resident
            with self._lock:
                resident.worker, resident.on_device, resident.on_host = worker, {}, {}
                resident.process_models, resident.limit, resident.fetch, resident.eviction = (), None, None, None

    # ---- around a call ---------------------------------------------------------------------------------------------

    def announce(self, model: str, components: Sequence[str]) -> None:
        """Prefetch the components of a call that waits for its inputs, if they fit beside the running call."""
        residents = [resident for resident in self._residents.get(model, ()) if resident.missing(components)]
        with self._lock:
            if not all(self._fits_beside(resident, components) for resident in residents):
                return
            for resident in residents:
                resident.fetch = self._send(resident, "device", resident.missing(components))

    def prepare(self, future: Future, model: str, method: str, needs: Mapping[str, Sequence[str]]) -> None:
        """Move the components in ``needs`` (by model) to the devices, whose positions the caller has reserved.

        Raises WorkerError if a process cannot move them.
        """
        callers = self._residents.get(model, ())
        wanted = {r: names for name, names in needs.items() if names for r in self._residents.get(name, ())}
        if not wanted:
            return
        start = time.perf_counter()
        self._await_fetches(future, wanted)
        asked: set[tuple[_ResidentModel, str]] = set()
        while leaving := self._choose_evictions(callers, method, wanted, asked):
            self._move(future, "host", leaving)
        neighbours = {resident for caller in callers for resident in self._neighbours(caller)}
        evictions = [resident.eviction for resident in neighbours if resident.eviction]  # for other calls
        wait(future, evictions, self.deadlines)
        self._move(future, "device", {r: r.missing(components) for r, components in wanted.items()}, callers)
        with self._lock:
            self._waited += time.perf_counter() - start
            for resident in callers:
                resident.last_call = next(self._numbers)
                self._computing |= dict.fromkeys(resident.positions, (resident, method))

    def release(self, model: str) -> None:
        """End the call that was prepared."""
        with self._lock:
            for resident in self._residents.get(model, ()):
                for position in resident.positions:
                    self._computing.pop(position, None)

    def record(self, tasks: Sequence[WorkerTask], metas: Sequence[Meta], method: str | None = None) -> None:
        """Record what workers reported of their memory after a call of ``method``, or after a move (None)."""
        with self._lock:
            for task, meta in zip(tasks, metas, strict=True):
                resident = self._by_name.get(task.worker)
                if resident is not None and meta.use is not None:
                    self._record_use(resident, meta.use)
                    if method is not None:
                        resident.extra[method] = max(resident.extra.get(method, 0), meta.use.peak - meta.use.baseline)

    def take_stats(self) -> Stats:
        """The metrics since the last call of this method.

        `swaps/<model>/in` and `…/out`: how often components of it moved; `swaps/<model>/ahead`: how often they were
        prefetched; `swaps/mib`: MiB moved; `time/swaps`: seconds that calls waited; `memory/device`: the peak of a
        position in MiB.
        """
        with self._lock:
            if not self._residents:
                return {}
            stats: Stats = {f"swaps/{name}": Total(float(number)) for name, number in self._counts.items()}
            stats |= {"memory/device": Max(self._peak / 2**20), "time/swaps": Total(self._waited)}
            self._counts.clear()
            self._peak = self._waited = 0.0
        return stats

    # ---- decisions -------------------------------------------------------------------------------------------------

    def _choose_evictions(
        self,
        callers: Sequence[_ResidentModel],
        method: str,
        wanted: Mapping[_ResidentModel, Sequence[str]],
        asked: set[tuple[_ResidentModel, str]],
    ) -> dict[_ResidentModel, list[str]]:
        """Which components leave the callers' positions: none if everything that is wanted fits.

        A component may free less memory than its size (tensors that it shares stay), so this is called until everything
        fits; ``asked`` has the components that were already chosen.
        """
        leaving: dict[_ResidentModel, list[str]] = {}
        with self._lock:
            for caller in callers:
                free = self._free_bytes(caller, method, wanted)
                for resident, component in self._candidates(caller, wanted):
                    if resident is caller if free is None else free >= 0:
                        break
                    if (resident, component) not in asked:
                        asked.add((resident, component))
                        leaving.setdefault(resident, []).append(component)
                        free = None if free is None else free + resident.on_device[component] / len(resident.positions)
        return leaving

    def _free_bytes(
        self, caller: _ResidentModel, method: str, wanted: Mapping[_ResidentModel, Sequence[str]]
    ) -> float | None:
        """Bytes free on a caller's fullest position at the call's peak, with all ``wanted`` there (None: unknown)."""
        if self.capacity is None or method not in caller.extra:
            return None
        extra = GROWTH * caller.extra[method] / len(caller.positions)
        return min(self.capacity - self._load(position, wanted) - extra for position in caller.positions)

    def _load(self, position: SlotPosition, wanted: Mapping[_ResidentModel, Sequence[str]]) -> float:
        """Bytes at a position once all wanted components are there."""
        residents = self._by_position[position]
        coming = sum(sum(r.on_host[c] for c in r.missing(wanted.get(r, ()))) / len(r.positions) for r in residents)
        return coming + sum(resident.size for resident in residents)

    def _candidates(
        self, caller: _ResidentModel, wanted: Mapping[_ResidentModel, Sequence[str]]
    ) -> Iterator[tuple[_ResidentModel, str]]:
        """The components that may leave the caller's positions, in order.

        A training step is a cycle, so the model that was called last is needed last and leaves first. Models that were
        announced follow, then the caller's components that this call does not need.
        """
        order = sorted(self._neighbours(caller), key=lambda r: (r is caller, r.fetch is not None, -r.last_call))
        for resident in order:
            for name in EVICTION_ORDER:
                if name in resident.movable and name in resident.on_device and name not in wanted.get(resident, ()):
                    yield resident, name

    def _neighbours(self, caller: _ResidentModel) -> list[_ResidentModel]:
        """The processes at a resident's positions, itself included."""
        return list(dict.fromkeys(resident for p in caller.positions for resident in self._by_position[p]))

    def _fits_beside(self, resident: _ResidentModel, components: Sequence[str]) -> bool:
        """Whether components of a resident fit on its positions beside the call that runs there."""
        if self.capacity is None:
            return False
        for position in resident.positions:
            computing, method = self._computing.get(position, (None, ""))
            extra = 0 if computing is None else computing.extra.get(method)
            if extra is None or self._load(position, {resident: components}) + GROWTH * extra > self.capacity:
                return False
        return True

    # ---- moves -----------------------------------------------------------------------------------------------------

    def _move(
        self,
        future: Future,
        to: str,
        moves: Mapping[_ResidentModel, Sequence[str]],
        callers: Sequence[_ResidentModel] = (),
    ) -> None:
        """Move components of several processes at once, and wait. Callers are sent a memory limit that has changed."""
        with self._lock:
            new_limits = {resident: () for resident in callers if self._limit(resident) != resident.limit}
            asked = new_limits | {resident: components for resident, components in moves.items() if components}
            tasks = {resident: self._send(resident, to, components) for resident, components in asked.items()}
            for resident in tasks if to == "host" else ():
                resident.eviction = tasks[resident]
        metas = wait(future, list(tasks.values()), self.deadlines)
        self.record(list(tasks.values()), metas)
        self._count(tasks, metas, "out" if to == "host" else "in")
        for resident in tasks:
            resident.eviction = None

    def _await_fetches(self, future: Future, residents: Iterable[_ResidentModel]) -> None:
        """Wait for prefetched components. Their memory reports may be outdated, so they are not recorded."""
        tasks = {resident: resident.fetch for resident in residents if resident.fetch}
        metas = wait(future, list(tasks.values()), self.deadlines)
        self._count(tasks, metas, "in", "ahead")
        for resident in tasks:
            resident.fetch = None

    def _send(self, resident: _ResidentModel, to: str, components: Sequence[str]) -> WorkerTask:
        """Start a move, and record its result at once."""
        on_device, on_host = dict(resident.on_device), dict(resident.on_host)
        source, target = (on_host, on_device) if to == "device" else (on_device, on_host)
        target |= {component: source.pop(component) for component in components}
        resident.on_device, resident.on_host = on_device, on_host
        resident.limit = self._limit(resident)
        return resident.worker.execute("move", to, tuple(components), resident.limit)

    def _limit(self, resident: _ResidentModel) -> int | None:
        """Bytes that a process may use on its devices beside other processes (None: no limit is known)."""
        if self.capacity is None or not resident.process_models:
            return resident.limit
        foreign = (
            neighbour.size
            for position in resident.positions
            for neighbour in self._by_position[position]
            if neighbour.model not in resident.process_models
        )
        return int(self.capacity * len(resident.positions) - sum(foreign))

    def _record_use(self, resident: _ResidentModel, use: DeviceMemoryUse) -> None:
        """Record a process's report, which has all models that it has on its devices."""
        neighbours = self._neighbours(resident)
        for neighbour in neighbours:
            if neighbour.model in use.on_device:
                neighbour.process_models = use.on_device.keys()
                neighbour.on_device = use.on_device[neighbour.model]
                neighbour.on_host = use.on_host.get(neighbour.model, neighbour.on_host)
        elsewhere = [neighbour.size for neighbour in neighbours if neighbour.model not in use.on_device]
        self._peak = max(self._peak, use.peak / len(resident.positions) + sum(elsewhere))

    def _count(self, moved: Iterable[_ResidentModel], metas: Sequence[Meta], *names: str) -> None:
        """Count one move for each model that moved any byte, however many processes and components it has."""
        with self._lock:
            sizes = [(resident.model, meta.value) for resident, meta in zip(moved, metas, strict=True)]
            self._counts["mib"] += sum(size for _, size in sizes) / 2**20
            for model in {model for model, size in sizes if size}:
                for name in names:
                    self._counts[f"{model}/{name}"] += 1
