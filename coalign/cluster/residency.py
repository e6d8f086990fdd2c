"""Who is on the devices: before a call of a model, the parts of it that the call needs are there, after others left.

The driver decides and counts, workers move (coalign.memory.arena, or an engine's own way). Processes that share places
are their tenants; what they have there is what they said after their last call. With a known capacity somebody leaves
only if there is no room otherwise, and what an announced call needs comes before its turn if there is room for it;
without, the models of a place take turns.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from coalign.cluster.answers import Running, WorkerHandle, wait
from coalign.cluster.future import DeviceMemoryUse, Future, Meta
from coalign.cluster.placement.slots import Slot
from coalign.config.schema import ModelConfig
from coalign.memory.arena import PARTS
from coalign.types import Max, Stats, Total

GROWTH = 1.25  # what a call takes grows with its samples: room is made for so much more than it took so far
LEAVING = ("optimizer", "gradients", "kv", "weights")  # in this order: fewest calls need what is first
SlotPlace = tuple[str, int]  # (slot, number)
Sizes = Mapping[str, int]  # bytes of each part


@dataclass(eq=False)
class ResidentModel:
    """One process of a model. ``held``: the parts on its devices, ``away``: the others, with what they would bring.

    ``movable``: the parts that may leave. ``extra``: the most that a method had beyond what was there before it.
    """

    model: str
    places: tuple[SlotPlace, ...]
    worker: WorkerHandle
    movable: frozenset[str]
    held: Sizes = field(default_factory=dict)
    away: Sizes = field(default_factory=dict)
    extra: dict[str, int] = field(default_factory=dict)
    reports: Collection[str] = ()  # the models of its process
    limit: int | None = None  # bytes that it was told it may have
    last: int = 0  # the number of its last call
    coming: Running | None = None  # what an announced call needs
    going: Running | None = None  # what is on its way to the host

    @property
    def size(self) -> float:
        """Bytes on each of its devices."""
        return sum(self.held.values()) / len(self.places)

    def missing(self, parts: Iterable[str]) -> list[str]:
        return [part for part in parts if part in self.away]


def movable(config: ModelConfig, devices: int, colocated: bool) -> frozenset[str]:
    """The parts of a model that may leave: of one that computes on so many ``devices`` per process."""
    if config.offload != "auto":
        return frozenset(config.offload)
    return frozenset(PARTS) if devices and colocated else frozenset()


class Residency:
    """Looks after every slot of which something may leave, and with a ``capacity`` (bytes of one place) after all slots
    of devices; if there are none, CPUs stand for them. ``timeout``: seconds that a move may take."""

    def __init__(
        self, slots: Mapping[str, Slot], models: Mapping[str, ModelConfig], capacity: int | None, timeout: float
    ) -> None:
        self.capacity = capacity
        self.timeout = timeout
        self.movable = {
            name: movable(models[name], slot.footprints[name].devices, len(slot.places) > 1)
            for name, slot in slots.items()
        }
        limited = [slot for slot in slots.values() if slot.devices] or list(slots.values())
        leaves = [slot for name, slot in slots.items() if self.movable[name] and len(slot.places) > 1]
        self.slots = {slot.name for slot in ([] if capacity is None else limited) + leaves}
        self._tenants: dict[str, list[ResidentModel]] = {}
        self._at: dict[SlotPlace, list[ResidentModel]] = {}
        self._where: dict[str, ResidentModel] = {}
        self._computing: dict[SlotPlace, tuple[ResidentModel, str]] = {}
        self._numbers = count(1)
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._peak = self._waited = 0.0
        self._books = threading.Lock()

    def add(self, model: str, slot: Slot, workers: Sequence[WorkerHandle]) -> None:
        """A model's processes have been started; nothing, if its slot is not looked after."""
        if slot.name not in self.slots:
            return
        self._tenants[model] = []
        for some, worker in zip(slot.places[model], workers, strict=True):
            tenant = ResidentModel(model, tuple((slot.name, place) for place in some), worker, self.movable[model])
            self._tenants[model].append(tenant)
            self._where[worker.where] = tenant
            for place in tenant.places:
                self._at.setdefault(place, []).append(tenant)

    # ---- around a call ---------------------------------------------------------------------------------------------

    def announce(self, model: str, parts: Sequence[str]) -> None:
        """A call that needs these parts waits for its inputs. They come now, beside whoever computes there, if there is
        room for them without anybody leaving."""
        tenants = [tenant for tenant in self._tenants.get(model, ()) if tenant.missing(parts)]
        with self._books:
            if not all(self._fits_beside(tenant, parts) for tenant in tenants):
                return
            for tenant in tenants:
                tenant.coming = self._send(tenant, "device", tenant.missing(parts))

    def prepare(self, future: Future, model: str, method: str, needs: Mapping[str, Sequence[str]]) -> None:
        """Have the parts that ``needs`` names, of this and of other models, on the places of ``model``, which are held.

        Raises WorkerError if a process cannot move what it has.
        """
        callers = self._tenants.get(model, ())
        wanted = {t: parts for name, parts in needs.items() if parts for t in self._tenants.get(name, ())}
        if not wanted:
            return
        begun = time.perf_counter()
        self._arrive(future, wanted)
        asked: set[tuple[ResidentModel, str]] = set()
        while leaving := self._leaving(callers, method, wanted, asked):
            self._move(future, "host", leaving)
        neighbours = {tenant for caller in callers for tenant in self._neighbours(caller)}
        wait(future, [tenant.going for tenant in neighbours if tenant.going], self.timeout)  # for somebody else
        self._move(future, "device", {tenant: tenant.missing(parts) for tenant, parts in wanted.items()}, callers)
        with self._books:
            self._waited += time.perf_counter() - begun
            for tenant in callers:
                tenant.last = next(self._numbers)
                self._computing |= dict.fromkeys(tenant.places, (tenant, method))

    def done(self, model: str) -> None:
        """The call that was prepared is over."""
        with self._books:
            for place in (place for tenant in self._tenants.get(model, ()) for place in tenant.places):
                self._computing.pop(place, None)

    def note(self, running: Sequence[Running], metas: Sequence[Meta], method: str | None = None) -> None:
        """What workers said of their memory after a call of ``method``, or after a move. The places are still held."""
        with self._books:
            for each, meta in zip(running, metas, strict=True):
                tenant = self._where.get(each.where)
                if tenant is not None and meta.use is not None:
                    self._take_over(tenant, meta.use)
                    if method is not None:
                        tenant.extra[method] = max(tenant.extra.get(method, 0), meta.use.peak - meta.use.before)

    def take(self) -> Stats:
        """What happened since this was last asked: `swaps/<model>/in` and `…/out` (how often something of it moved),
        `swaps/<model>/ahead` (of the former, before its turn), `swaps/mib` moved, `time/swaps`: seconds that calls
        waited for them, and `memory/device`: the peak of a place in MiB."""
        with self._books:
            if not self._tenants:
                return {}
            stats: Stats = {f"swaps/{name}": Total(float(number)) for name, number in self._counts.items()}
            stats |= {"memory/device": Max(self._peak / 2**20), "time/swaps": Total(self._waited)}
            self._counts.clear()
            self._peak = self._waited = 0.0
        return stats

    # ---- decisions -------------------------------------------------------------------------------------------------

    def _leaving(
        self,
        callers: Sequence[ResidentModel],
        method: str,
        wanted: Mapping[ResidentModel, Sequence[str]],
        asked: set[tuple[ResidentModel, str]],
    ) -> dict[ResidentModel, list[str]]:
        """Who leaves the callers' places, with which parts: nobody if all that is wanted fits, or nobody is left to be
        ``asked``. What leaves may give less room than it has (what it shares stays), so this is asked until it fits."""
        leaving: dict[ResidentModel, list[str]] = {}
        with self._books:
            for caller in callers:
                room = self._room(caller, method, wanted)
                for tenant, part in self._candidates(caller, wanted):
                    if tenant is caller if room is None else room >= 0:
                        break
                    if (tenant, part) not in asked:
                        asked.add((tenant, part))
                        leaving.setdefault(tenant, []).append(part)
                        room = None if room is None else room + tenant.held[part] / len(tenant.places)
        return leaving

    def _room(self, caller: ResidentModel, method: str, wanted: Mapping[ResidentModel, Sequence[str]]) -> float | None:
        """Bytes left on the fullest of a caller's places when all that is wanted has come and the call is at its peak;
        None: who knows."""
        if self.capacity is None or method not in caller.extra:
            return None
        extra = GROWTH * caller.extra[method] / len(caller.places)
        return min(self.capacity - self._load(place, wanted) - extra for place in caller.places)

    def _load(self, place: SlotPlace, wanted: Mapping[ResidentModel, Sequence[str]]) -> float:
        """Bytes at a place once all that is wanted has come."""
        tenants = self._at[place]
        coming = sum(sum(t.away[part] for part in t.missing(wanted.get(t, ()))) / len(t.places) for t in tenants)
        return coming + sum(tenant.size for tenant in tenants)

    def _candidates(
        self, caller: ResidentModel, wanted: Mapping[ResidentModel, Sequence[str]]
    ) -> Iterator[tuple[ResidentModel, str]]:
        """What may leave the caller's places. A step is a cycle, so who was called last is needed last, and goes first;
        then who is about to be called; at last the caller's own parts that this call does not need."""
        order = sorted(self._neighbours(caller), key=lambda t: (t is caller, t.coming is not None, -t.last))
        for tenant in order:
            for part in LEAVING:
                if part in tenant.movable and part in tenant.held and part not in wanted.get(tenant, ()):
                    yield tenant, part

    def _neighbours(self, caller: ResidentModel) -> list[ResidentModel]:
        """Everybody at a tenant's places, itself included."""
        return list(dict.fromkeys(tenant for place in caller.places for tenant in self._at[place]))

    def _fits_beside(self, tenant: ResidentModel, parts: Sequence[str]) -> bool:
        """Whether parts of a tenant can come while its places compute."""
        if self.capacity is None:
            return False
        for place in tenant.places:
            computing, method = self._computing.get(place, (None, ""))
            extra = 0 if computing is None else computing.extra.get(method)
            if extra is None or self._load(place, {tenant: parts}) + GROWTH * extra > self.capacity:
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
        """Move parts of several tenants at once, and wait for it. Callers whose room has changed hear of it anyway."""
        with self._books:
            told = {tenant: () for tenant in callers if self._limit(tenant) != tenant.limit}
            asked = told | {tenant: parts for tenant, parts in moves.items() if parts}
            running = {tenant: self._send(tenant, to, parts) for tenant, parts in asked.items()}
            for tenant in running if to == "host" else ():
                tenant.going = running[tenant]
        metas = wait(future, list(running.values()), self.timeout)
        self.note(list(running.values()), metas)
        self._count(running, metas, "out" if to == "host" else "in")
        for tenant in running:
            tenant.going = None

    def _arrive(self, future: Future, tenants: Iterable[ResidentModel]) -> None:
        """Wait for what has been announced. What it says of its memory may be old by now."""
        running = {tenant: tenant.coming for tenant in tenants if tenant.coming}
        metas = wait(future, list(running.values()), self.timeout)
        self._count(running, metas, "in", "ahead")
        for tenant in running:
            tenant.coming = None

    def _send(self, tenant: ResidentModel, to: str, parts: Sequence[str]) -> Running:
        """Ask for a move; the books take it as done."""
        if to == "device":
            tenant.held = {**tenant.held, **{part: tenant.away[part] for part in parts}}
            tenant.away = {part: size for part, size in tenant.away.items() if part not in parts}
        else:
            tenant.away = {**tenant.away, **{part: tenant.held[part] for part in parts}}
            tenant.held = {part: size for part, size in tenant.held.items() if part not in parts}
        tenant.limit = self._limit(tenant)
        return tenant.worker.execute("move", to, tuple(parts), tenant.limit)

    def _limit(self, tenant: ResidentModel) -> int | None:
        """Bytes that a process may have on its devices beside what other processes have there (None: nothing new)."""
        if self.capacity is None or not tenant.reports:
            return tenant.limit
        others = (t.size for place in tenant.places for t in self._at[place] if t.model not in tenant.reports)
        return int(self.capacity * len(tenant.places) - sum(others))

    def _take_over(self, tenant: ResidentModel, use: DeviceMemoryUse) -> None:
        """A process tells of all models that it has on its devices."""
        neighbours = self._neighbours(tenant)
        for other in neighbours:
            if other.model in use.held:
                other.reports = use.held.keys()
                other.held = use.held[other.model]
                other.away = use.away.get(other.model, other.away)
        elsewhere = [other.size for other in neighbours if other.model not in use.held]
        self._peak = max(self._peak, use.peak / len(tenant.places) + sum(elsewhere))

    def _count(self, moved: Iterable[ResidentModel], metas: Sequence[Meta], *names: str) -> None:
        """Once for a model, whatever the number of its processes and parts, if any byte of it moved."""
        with self._books:
            sizes = [(tenant.model, meta.value) for tenant, meta in zip(moved, metas, strict=True)]
            self._counts["mib"] += sum(size for _, size in sizes) / 2**20
            for model in {model for model, size in sizes if size}:
                for name in names:
                    self._counts[f"{model}/{name}"] += 1
