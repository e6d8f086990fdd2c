"""Decides which parts of which models are on the devices, and moves the parts that a call needs there.

The driver decides and keeps count, workers move (coalign.memory, or an engine by its own means). What a process
has on its device is what it reported after its last call. With a known capacity a part leaves only if there is no
memory for a call otherwise, and what a later call needs is fetched ahead where it fits. Without one, models of a place
take turns.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from coalign.cluster.future import CallDeadlines, DeviceMemoryUse, Future, Meta, WorkerHandle, WorkerTask, wait
from coalign.cluster.placement.slots import Slot, list_movable_parts
from coalign.config.schema import ModelConfig
from coalign.types import Max, Stats, Total

GROWTH = 1.25  # a call's memory grows with its samples: so much more is kept free than it took so far
EVICTION_ORDER = ("optimizer", "gradients", "kv", "weights")  # first the parts that the fewest calls need
SlotPlace = tuple[str, int]  # (slot, number)
Sizes = Mapping[str, int]  # bytes of each part


@dataclass(eq=False)
class ResidentModel:
    """One process of a model: the parts that are ``on_device``, and those ``on_host`` with the bytes they would need.

    ``movable``: the parts that may leave the device. ``extra``: by method, the most bytes that a call took beyond what
    was there before it.
    """

    model: str
    places: tuple[SlotPlace, ...]
    worker: WorkerHandle
    movable: frozenset[str]
    on_device: Sizes = field(default_factory=dict)
    on_host: Sizes = field(default_factory=dict)
    extra: dict[str, int] = field(default_factory=dict)
    process_models: Collection[str] = ()  # that its process reports
    limit: int | None = None  # bytes that the process may use, as last sent to it
    last_call: int = 0  # number of its last call
    fetch: WorkerTask | None = None  # of parts that an announced call needs
    eviction: WorkerTask | None = None  # of parts to the host

    @property
    def size(self) -> float:
        """Bytes on each of its devices."""
        return sum(self.on_device.values()) / len(self.places)

    def missing(self, parts: Iterable[str]) -> list[str]:
        return [part for part in parts if part in self.on_host]


class Residency:
    """Manages the device memory of every slot from which parts may leave.

    With a ``capacity`` (bytes of one place) it manages all slots with devices; if there are none, CPU slots take their
    part. A move may take as long as the call that it is for.
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
            name: list_movable_parts(models[name], slot.footprints[name].devices, len(slot.places) > 1)
            for name, slot in slots.items()
        }
        limited = [slot for slot in slots.values() if slot.devices] or list(slots.values())
        leaves = [slot for name, slot in slots.items() if self.movable[name] and len(slot.places) > 1]
        self.slots = {slot.name for slot in ([] if capacity is None else limited) + leaves}
        self._residents: dict[str, list[ResidentModel]] = {}
        self._by_place: dict[SlotPlace, list[ResidentModel]] = {}
        self._by_name: dict[str, ResidentModel] = {}
        self._computing: dict[SlotPlace, tuple[ResidentModel, str]] = {}
        self._numbers = count(1)
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._peak = self._waited = 0.0
        self._lock = threading.Lock()

    def add(self, model: str, slot: Slot, workers: Sequence[WorkerHandle]) -> None:
        """Register the processes of a model; does nothing if its slot is not managed."""
        if slot.name not in self.slots:
            return
        self._residents[model] = []
        for some, worker in zip(slot.places[model], workers, strict=True):
            resident = ResidentModel(model, tuple((slot.name, place) for place in some), worker, self.movable[model])
            self._residents[model].append(resident)
            self._by_name[worker.where] = resident
            for place in resident.places:
                self._by_place.setdefault(place, []).append(resident)

    def replace(self, former: str, worker: WorkerHandle) -> None:
        """Register the process that was started in place of one, by its name. It has nothing on its devices."""
        resident = self._by_name.pop(former, None)
        if resident is not None:
            self._by_name[worker.where] = resident
            with self._lock:
                resident.worker, resident.on_device, resident.on_host = worker, {}, {}
                resident.process_models, resident.limit, resident.fetch, resident.eviction = (), None, None, None

    # ---- around a call ---------------------------------------------------------------------------------------------

    def announce(self, model: str, parts: Sequence[str]) -> None:
        """Fetch the parts of a call that waits for its inputs, if they fit on the devices beside the call that runs."""
        residents = [resident for resident in self._residents.get(model, ()) if resident.missing(parts)]
        with self._lock:
            if not all(self._fits_beside(resident, parts) for resident in residents):
                return
            for resident in residents:
                resident.fetch = self._send(resident, "device", resident.missing(parts))

    def prepare(self, future: Future, model: str, method: str, needs: Mapping[str, Sequence[str]]) -> None:
        """Move the parts in ``needs`` (by model) to the devices before a call; the caller has reserved the places.

        Raises WorkerError if a process cannot move its parts.
        """
        callers = self._residents.get(model, ())
        wanted = {r: parts for name, parts in needs.items() if parts for r in self._residents.get(name, ())}
        if not wanted:
            return
        start = time.perf_counter()
        self._await_fetches(future, wanted)
        asked: set[tuple[ResidentModel, str]] = set()
        while leaving := self._choose_evictions(callers, method, wanted, asked):
            self._move(future, "host", leaving)
        neighbours = {resident for caller in callers for resident in self._neighbours(caller)}
        evictions = [resident.eviction for resident in neighbours if resident.eviction]  # for other calls
        wait(future, evictions, self.deadlines)
        self._move(future, "device", {resident: resident.missing(parts) for resident, parts in wanted.items()}, callers)
        with self._lock:
            self._waited += time.perf_counter() - start
            for resident in callers:
                resident.last_call = next(self._numbers)
                self._computing |= dict.fromkeys(resident.places, (resident, method))

    def release(self, model: str) -> None:
        """End the call that was prepared."""
        with self._lock:
            for resident in self._residents.get(model, ()):
                for place in resident.places:
                    self._computing.pop(place, None)

    def record(self, tasks: Sequence[WorkerTask], metas: Sequence[Meta], method: str | None = None) -> None:
        """Record what workers reported of their memory after a call of ``method``, or after a move (None)."""
        with self._lock:
            for task, meta in zip(tasks, metas, strict=True):
                resident = self._by_name.get(task.where)
                if resident is not None and meta.use is not None:
                    self._record_use(resident, meta.use)
                    if method is not None:
                        resident.extra[method] = max(resident.extra.get(method, 0), meta.use.peak - meta.use.before)

    def take_stats(self) -> Stats:
        """The metrics since the last call of this method.

        `swaps/<model>/in` and `…/out`: how often parts of it moved; `swaps/<model>/ahead`: how often they were fetched
        ahead; `swaps/mib`: MiB moved; `time/swaps`: seconds that calls waited; `memory/device`: the peak of a place in
        MiB.
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
        callers: Sequence[ResidentModel],
        method: str,
        wanted: Mapping[ResidentModel, Sequence[str]],
        asked: set[tuple[ResidentModel, str]],
    ) -> dict[ResidentModel, list[str]]:
        """Which parts leave the callers' places: none if everything that is wanted fits.

        A part may free less memory than its size (tensors that it shares stay), so this is called until everything
        fits; ``asked`` has the parts that were already chosen.
        """
        leaving: dict[ResidentModel, list[str]] = {}
        with self._lock:
            for caller in callers:
                free = self._free_bytes(caller, method, wanted)
                for resident, part in self._candidates(caller, wanted):
                    if resident is caller if free is None else free >= 0:
                        break
                    if (resident, part) not in asked:
                        asked.add((resident, part))
                        leaving.setdefault(resident, []).append(part)
                        free = None if free is None else free + resident.on_device[part] / len(resident.places)
        return leaving

    def _free_bytes(
        self, caller: ResidentModel, method: str, wanted: Mapping[ResidentModel, Sequence[str]]
    ) -> float | None:
        """Bytes free on the fullest of a caller's places when all wanted parts are there and the call is at its peak;
        None if unknown."""
        if self.capacity is None or method not in caller.extra:
            return None
        extra = GROWTH * caller.extra[method] / len(caller.places)
        return min(self.capacity - self._load(place, wanted) - extra for place in caller.places)

    def _load(self, place: SlotPlace, wanted: Mapping[ResidentModel, Sequence[str]]) -> float:
        """Bytes at a place once all wanted parts are there."""
        residents = self._by_place[place]
        coming = sum(sum(r.on_host[part] for part in r.missing(wanted.get(r, ()))) / len(r.places) for r in residents)
        return coming + sum(resident.size for resident in residents)

    def _candidates(
        self, caller: ResidentModel, wanted: Mapping[ResidentModel, Sequence[str]]
    ) -> Iterator[tuple[ResidentModel, str]]:
        """The parts that may leave the caller's places, in order.

        A training step is a cycle, so the model that was called last is needed last and leaves first. Models that were
        announced follow, then the caller's own parts that this call does not need.
        """
        order = sorted(self._neighbours(caller), key=lambda r: (r is caller, r.fetch is not None, -r.last_call))
        for resident in order:
            for part in EVICTION_ORDER:
                if part in resident.movable and part in resident.on_device and part not in wanted.get(resident, ()):
                    yield resident, part

    def _neighbours(self, caller: ResidentModel) -> list[ResidentModel]:
        """The processes at a resident's places, itself included."""
        return list(dict.fromkeys(resident for place in caller.places for resident in self._by_place[place]))

    def _fits_beside(self, resident: ResidentModel, parts: Sequence[str]) -> bool:
        """Whether parts of a resident fit on its places beside the call that runs there."""
        if self.capacity is None:
            return False
        for place in resident.places:
            computing, method = self._computing.get(place, (None, ""))
            extra = 0 if computing is None else computing.extra.get(method)
            if extra is None or self._load(place, {resident: parts}) + GROWTH * extra > self.capacity:
                return False
        return True

    # ---- moves -----------------------------------------------------------------------------------------------------

    def _move(
        self,
        future: Future,
        to: str,
        moves: Mapping[ResidentModel, Sequence[str]],
        callers: Sequence[ResidentModel] = (),
    ) -> None:
        """Move parts of several processes at once, and wait. Callers are sent a memory limit that has changed."""
        with self._lock:
            new_limits = {resident: () for resident in callers if self._limit(resident) != resident.limit}
            asked = new_limits | {resident: parts for resident, parts in moves.items() if parts}
            tasks = {resident: self._send(resident, to, parts) for resident, parts in asked.items()}
            for resident in tasks if to == "host" else ():
                resident.eviction = tasks[resident]
        metas = wait(future, list(tasks.values()), self.deadlines)
        self.record(list(tasks.values()), metas)
        self._count(tasks, metas, "out" if to == "host" else "in")
        for resident in tasks:
            resident.eviction = None

    def _await_fetches(self, future: Future, residents: Iterable[ResidentModel]) -> None:
        """Wait for parts that were fetched ahead. Their memory reports may be outdated, so they are not recorded."""
        tasks = {resident: resident.fetch for resident in residents if resident.fetch}
        metas = wait(future, list(tasks.values()), self.deadlines)
        self._count(tasks, metas, "in", "ahead")
        for resident in tasks:
            resident.fetch = None

    def _send(self, resident: ResidentModel, to: str, parts: Sequence[str]) -> WorkerTask:
        """Start a move; from now on it counts as done."""
        on_device, on_host = dict(resident.on_device), dict(resident.on_host)
        source, target = (on_host, on_device) if to == "device" else (on_device, on_host)
        target |= {part: source.pop(part) for part in parts}
        resident.on_device, resident.on_host = on_device, on_host
        resident.limit = self._limit(resident)
        return resident.worker.execute("move", to, tuple(parts), resident.limit)

    def _limit(self, resident: ResidentModel) -> int | None:
        """Bytes that a process may use on its devices beside other processes (None: no limit is known)."""
        if self.capacity is None or not resident.process_models:
            return resident.limit
        others = (
            other.size
            for place in resident.places
            for other in self._by_place[place]
            if other.model not in resident.process_models
        )
        return int(self.capacity * len(resident.places) - sum(others))

    def _record_use(self, resident: ResidentModel, use: DeviceMemoryUse) -> None:
        """Record a process's report, which has all models that it has on its devices."""
        neighbours = self._neighbours(resident)
        for other in neighbours:
            if other.model in use.on_device:
                other.process_models = use.on_device.keys()
                other.on_device = use.on_device[other.model]
                other.on_host = use.on_host.get(other.model, other.on_host)
        elsewhere = [other.size for other in neighbours if other.model not in use.on_device]
        self._peak = max(self._peak, use.peak / len(resident.places) + sum(elsewhere))

    def _count(self, moved: Iterable[ResidentModel], metas: Sequence[Meta], *names: str) -> None:
        """Count one move of each model of which any byte moved, whatever the number of its processes and parts."""
        with self._lock:
            sizes = [(resident.model, meta.value) for resident, meta in zip(moved, metas, strict=True)]
            self._counts["mib"] += sum(size for _, size in sizes) / 2**20
            for model in {model for model, size in sizes if size}:
                for name in names:
                    self._counts[f"{model}/{name}"] += 1
