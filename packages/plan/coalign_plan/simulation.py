"""Simulates rollouts as discrete events: sequences of different lengths on one replica, and steps that wait for them.

A replica generates for all sequences that it has room for. Between two events (a sequence ends, one is admitted, the
cache is full, weights arrive) every decode step takes about the same time, so the clock jumps from event to event.
Sequences that behave alike are one entry with a count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

EPSILON = 1e-9
RESERVED_GROWTH = 0.7  # share of a sequence's remaining tokens that admission leaves room for


class ReplicaPrices(Protocol):
    """What a simulation asks about an engine replica (coalign_plan.generation.EngineReplica answers it)."""

    @property
    def cache_bytes(self) -> float: ...

    def sequence_bytes(self, context: float) -> float: ...

    def decode_seconds(self, sequences: float, context: float) -> float: ...

    def prefill_seconds(self, tokens: float, length: float) -> float: ...


@dataclass
class SequenceGroup:
    """``count`` sequences (a fraction, where replicas are averaged) of one batch that are generated alike."""

    count: float
    batch: int
    prompt: float
    length: float
    done: float = 0.0

    @property
    def context(self) -> float:
        return self.prompt + self.done


@dataclass
class ReplicaSimulation:
    """One replica with its clock. ``waiting`` is in the order of admission; ``complete`` counts by batch."""

    prices: ReplicaPrices
    max_sequences: float
    group_samples: float = 1.0  # samples that share a prompt: its prefill is computed once
    time: float = 0.0
    busy: float = 0.0
    waiting: deque[SequenceGroup] = field(default_factory=deque)
    running: list[SequenceGroup] = field(default_factory=list)
    complete: dict[int, float] = field(default_factory=dict)

    @property
    def sequences(self) -> float:
        return sum(group.count for group in self.running)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def submit(self, groups: Sequence[SequenceGroup]) -> None:
        self.waiting.extend(group for group in groups if group.count > EPSILON)

    def wait_until(self, time: float) -> None:
        self.time = max(self.time, time)

    def advance(self, until: float = float("inf")) -> bool:
        """Go on to the next event, or to ``until``. Return whether a sequence has ended."""
        self._admit()
        if not self.running:
            if until < float("inf"):
                self.wait_until(until)
            return False
        count = self.sequences
        context = sum(group.count * group.context for group in self.running) / count
        steps = max(1.0, min(group.length - group.done for group in self.running))
        steps = min(steps, self._steps_until_full(count, context))
        seconds = self.prices.decode_seconds(count, context + steps / 2)
        if self.time + steps * seconds > until:
            steps = max(0.0, (until - self.time) / seconds)
            self._work(until - self.time)
        else:
            self._work(steps * seconds)
        for group in self.running:
            group.done += steps
        ended = [group for group in self.running if group.done >= group.length - EPSILON]
        for group in ended:
            self.complete[group.batch] = self.complete.get(group.batch, 0.0) + group.count
        self.running = [group for group in self.running if group.done < group.length - EPSILON]
        return bool(ended)

    def drop(self) -> float:
        """Give up all sequences that are not complete; return how many."""
        dropped = self.sequences + sum(group.count for group in self.waiting)
        self.running, self.waiting = [], deque()
        return dropped

    # ---- parts -----------------------------------------------------------------------------------------------------

    def _work(self, seconds: float) -> None:
        self.time += seconds
        self.busy += seconds * min(1.0, self.sequences)  # a fraction of a sequence: only some replicas still work

    def _admit(self) -> None:
        """Move waiting sequences to the running ones while there is room, and compute their prompts."""
        if not self.waiting:
            return
        used = sum(
            group.count * self.prices.sequence_bytes(group.context + RESERVED_GROWTH * (group.length - group.done))
            for group in self.running
        )
        count = self.sequences
        tokens = squares = 0.0
        while self.waiting:
            group = self.waiting[0]
            sequence_bytes = self.prices.sequence_bytes(group.context + RESERVED_GROWTH * (group.length - group.done))
            room = min(self.max_sequences - count, (self.prices.cache_bytes - used) / sequence_bytes)
            if room < min(1.0, group.count) - EPSILON and (self.running or tokens):
                break
            taken = min(group.count, max(room, min(1.0, group.count)))
            entry = SequenceGroup(taken, group.batch, group.prompt, group.length, group.done)
            group.count -= taken
            if group.count <= EPSILON:
                self.waiting.popleft()
            self.running.append(entry)
            used += taken * sequence_bytes
            count += taken
            shared = self.group_samples if entry.done == 0 else 1.0
            tokens += taken * entry.context / shared
            squares += taken * entry.context**2 / shared
        if tokens:
            self._work(self.prices.prefill_seconds(tokens, squares / tokens))

    def _steps_until_full(self, count: float, context: float) -> float:
        """Return how many steps the cache has room for; where it has none, send the youngest sequences back."""
        sequence_bytes = self.prices.sequence_bytes(context)
        growth = max(EPSILON, self.prices.sequence_bytes(context + 1) - sequence_bytes)
        free = self.prices.cache_bytes - count * sequence_bytes
        while free < growth * count and count > 1:
            group = self.running[-1]
            back = min(group.count, max(1.0, 0.1 * count), count - 1)
            self.waiting.appendleft(SequenceGroup(back, group.batch, group.prompt, group.length, group.done))
            group.count -= back
            if group.count <= EPSILON:
                self.running.pop()
            count -= back
            free += back * self.prices.sequence_bytes(group.context)
        return max(1.0, free / (growth * max(count, EPSILON)))


@dataclass(frozen=True)
class StepRules:
    """What orders rollouts and training steps. ``needed`` samples train a step; ``staleness`` may be a fraction.

    ``train_seconds`` is the trainer's time of a step, ``sync_seconds`` that in which the replica takes new weights.
    ``in_order``: a step trains on the samples drawn for it; without it, on those complete first. ``carries``: sequences
    go on after a sync; without it, a sync waits for those that run, and a synchronous step drops the unfinished.
    """

    needed: float
    train_seconds: float
    sync_seconds: float = 0.0
    staleness: float = 0.0
    in_order: bool = True
    carries: bool = False
    oversample: float = 1.0


@dataclass(frozen=True)
class SimulatedSteps:
    """Steps in steady state: seconds of one, and what the replica and the trainer do in it.

    ``generation`` is the time between two batches' completion for an idle trainer, or a synchronous rollout's.
    Counts are totals over the simulation: admitted = trained + dropped + unfinished.
    """

    period: float
    generation: float
    trainer_wait: float
    replica_busy: float
    staleness: float
    admitted: float
    trained: float
    dropped: float
    unfinished: float
    steps: int


def simulate_steps(
    replica: ReplicaSimulation, batch: Sequence[tuple[float, float, float]], rules: StepRules
) -> SimulatedSteps:
    """Simulate steps whose batches are ``batch``: (count, prompt tokens, response tokens), until they are steady."""
    offered = sum(count for count, _, _ in batch)
    is_memoryless = rules.staleness == 0 and (rules.oversample == 1 or not rules.carries)
    cycle = int(rules.staleness) + 1  # batches may be complete together, so whole cycles are counted
    counted = 1 if is_memoryless else cycle * -(-4 // cycle)
    steps = counted if is_memoryless else 2 * counted + 1
    admitted = trained = dropped = 0.0
    trainer_free, last, warmup_busy = 0.0, 0.0, 0.0
    ends: list[float] = []
    waits: list[float] = []
    ages: list[float] = []
    versions: list[int] = []  # weight version when each batch was drawn
    drawn = served = 0
    for version in range(steps):
        allowed = (rules.staleness + served + 1) * rules.needed + (rules.oversample - 1) * rules.needed + dropped
        while admitted < allowed - EPSILON * offered:
            share = 1.0 if rules.in_order else min(1.0, (allowed - admitted) / offered)
            if rules.in_order and admitted + offered > allowed + EPSILON * offered + (offered - rules.needed):
                break
            replica.submit([SequenceGroup(share * n, drawn, prompt, length) for n, prompt, length in batch])
            admitted += share * offered
            drawn += 1
            versions.append(served)
        while not _is_ready(replica, rules, version, trained):
            if not replica.has_work:
                raise RuntimeError("a rollout ended without enough samples")  # admitted < needed
            replica.advance()
        start = max(replica.time, trainer_free)
        waits.append(start - trainer_free)
        trained += rules.needed
        ages.append(version - versions[min(version, drawn - 1)])
        end = start + rules.train_seconds
        if rules.staleness == 0:
            if not rules.carries:
                dropped += replica.drop()
            replica.wait_until(end)
        else:
            while replica.time < end - EPSILON:
                replica.advance(end)
        if not rules.carries and rules.staleness:
            _drain(replica)
        replica.time += rules.sync_seconds
        trainer_free = replica.time if rules.staleness == 0 else end + rules.sync_seconds
        served = version + 1
        ends.append(trainer_free)
        if version == steps - counted - 1:
            last, warmup_busy = trainer_free, replica.busy
    period = (ends[-1] - last) / counted
    waiting = replica.sequences + sum(group.count for group in replica.waiting)
    untrained = sum(replica.complete.values()) - trained
    return SimulatedSteps(
        period=period,
        generation=period if rules.staleness else max(0.0, period - rules.train_seconds - rules.sync_seconds),
        trainer_wait=sum(waits[-counted:]) / counted,
        replica_busy=min(1.0, (replica.busy - warmup_busy) / max(EPSILON, period * counted)),
        staleness=sum(ages[-counted:]) / counted,
        admitted=admitted,
        trained=trained,
        dropped=dropped,
        unfinished=waiting + untrained,
        steps=steps,
    )


def _is_ready(replica: ReplicaSimulation, rules: StepRules, version: int, trained: float) -> bool:
    if rules.in_order and rules.oversample == 1:
        return replica.complete.get(version, 0.0) >= rules.needed * (1 - EPSILON)
    return sum(replica.complete.values()) - trained >= rules.needed * (1 - EPSILON)


def _drain(replica: ReplicaSimulation) -> None:
    """Let what runs end, and admit nothing meanwhile."""
    waiting, replica.waiting = replica.waiting, deque()
    while replica.has_work:
        replica.advance()
    replica.waiting = waiting
