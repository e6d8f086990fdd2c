"""The history of a run's groups of samples and steps, read from its journal (coalign.engine.rollouts.journal).

What a run trained after the checkpoint that it goes on from is kept as discarded: those steps are trained again, and
their groups may be drawn again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from coalign.engine.rollouts.journal import parse_groups


@dataclass
class GroupLife:
    """What is known of one group; times (``…_at``) are seconds since the journal began, None for what never happened.

    ``row`` is the number of the prompt's row in ``source``. ``begun`` are [time, weight version] of each start of its
    rollout. ``samples`` are [tokens, status, reward, versions] each. ``dropped`` is the cause, if it was dropped.
    ``discarded`` says why this life does not count.
    """

    group: int
    drawn_at: float | None = None
    drawn_for: int | None = None
    source: str = "?"
    row: Any = None
    begun: list[tuple[float, int]] = field(default_factory=list)
    done_at: float | None = None
    samples: list[list[Any]] = field(default_factory=list)
    taken_at: float | None = None
    taken_by: int | None = None
    trained_at: float | None = None
    trained_by: int | None = None
    replayed_by: list[int] = field(default_factory=list)
    dropped_at: float | None = None
    dropped: str | None = None
    discarded: str | None = None

    @property
    def state(self) -> str:
        """`trained`, `dropped` or `waiting`: every group is in one of them."""
        return "dropped" if self.dropped else "waiting" if self.trained_by is None else "trained"

    @property
    def ages(self) -> list[tuple[int, int]]:
        """(tokens, versions that they were behind the weights of the step that trained on them)."""
        if self.trained_by is None:
            return []
        return [(n, self.trained_by - 1 - version) for sample in self.samples for n, version in list_runs(sample)]


@dataclass
class StepHistory:
    """A training step: when it took its ``groups``, and when it was complete, with its loss."""

    step: int
    taken_at: float | None = None
    groups: list[int] = field(default_factory=list)
    replayed: list[int] = field(default_factory=list)
    trained_at: float | None = None
    loss: float | None = None
    synced: int | None = None
    discarded: str | None = None


def list_runs(sample: list[Any]) -> list[tuple[int, int]]:
    """Return (tokens, weight version) of each run of tokens of a sample, in their order."""
    tokens, versions = sample[0], sample[3]
    if isinstance(versions, int):
        return [(tokens, versions)]
    ends = [0, *versions[::2]]
    return [(end - start, version) for start, end, version in zip(ends, ends[1:], versions[1::2], strict=False)]


class RunHistory:
    """What a journal says. ``damaged`` are the numbers of lines that were left out, from 1."""

    def __init__(self, lines: Iterable[dict[str, Any] | None] = ()) -> None:
        self.groups: dict[int, GroupLife] = {}
        self.steps: dict[int, StepHistory] = {}
        self.former_groups: list[GroupLife] = []
        self.former_steps: list[StepHistory] = []
        self.damaged: list[int] = []
        self.restarts: list[str] = []  # a sentence each
        self.processes = 0  # that were lost and started again
        self.ended: str | None = None
        self._sources: dict[int, str] = {}
        for number, line in enumerate(lines, start=1):
            if line is None:
                self.damaged.append(number)
            elif read := getattr(self, f"_read_{line['event']}", None):
                read(line)

    def _find(self, text: str) -> Iterator[GroupLife]:
        for group in parse_groups(text):  # those whose line of being drawn is damaged are new here
            yield self.groups.setdefault(group, GroupLife(group))

    def _read_source(self, line: dict[str, Any]) -> None:
        self._sources[line["number"]] = line["name"]

    def _read_drawn(self, line: dict[str, Any]) -> None:
        for group, (source, row) in zip(parse_groups(line["groups"]), line["rows"], strict=True):
            life = GroupLife(group, line["at"], line["step"], self._sources.get(source, "?"), row)
            life.begun.append((line["at"], line["version"]))
            self.groups[group] = life

    def _read_begun(self, line: dict[str, Any]) -> None:
        for life in self._find(line["groups"]):
            life.begun.append((line["at"], line["version"]))
            life.done_at, life.samples = None, []

    def _read_done(self, line: dict[str, Any]) -> None:
        dropped = set(parse_groups(line.get("dropped", "")))
        for life, samples in zip(self._find(line["groups"]), line["samples"], strict=True):
            life.done_at, life.samples = line["at"], samples
            if life.group in dropped:
                life.dropped, life.dropped_at = "filter", line["at"]

    def _read_dropped(self, line: dict[str, Any]) -> None:
        for life in self._find(line["groups"]):
            life.dropped, life.dropped_at = line["cause"], line["at"]

    def _read_taken(self, line: dict[str, Any]) -> None:
        step = self.steps[line["step"]] = StepHistory(line["step"], line["at"])
        left_out = set(parse_groups(line.get("left_out", "")))
        for life in self._find(line["groups"]):
            life.taken_at, life.taken_by = line["at"], step.step
            if life.group in left_out:
                life.dropped, life.dropped_at = "replay.fn", line["at"]
            else:
                step.groups.append(life.group)
        for life in self._find(line.get("replayed", "")):
            if life.dropped == "replay.fn":
                life.dropped, life.dropped_at, life.taken_by = None, None, step.step
            life.replayed_by.append(step.step)
            step.replayed.append(life.group)

    def _read_trained(self, line: dict[str, Any]) -> None:
        step = self.steps.setdefault(line["step"], StepHistory(line["step"]))
        step.trained_at, step.loss, step.synced = line["at"], line.get("loss"), line.get("synced")
        self._end_step(step, line["at"])

    def _end_step(self, step: StepHistory, at: float | None) -> None:
        for group in (*step.groups, *step.replayed):
            life = self.groups[group]
            if life.taken_by == step.step and life.trained_by is None and not life.dropped:
                life.trained_at, life.trained_by = at, step.step

    def _read_restarted(self, line: dict[str, Any]) -> None:
        self.processes += line["processes"]

    def _read_ended(self, line: dict[str, Any]) -> None:
        self.ended = f"ended after step {line['step']}" + (f" ({line['why']})" if "why" in line else "")

    def _read_resumed(self, line: dict[str, Any]) -> None:
        """Return to the state of the checkpoint: it knows which groups had been drawn, and which wait."""
        step, at = line["step"], line["at"]
        why = f"the run was started again at {format_time(at)}, and went on after step {step}"
        self.restarts.append(why)
        self.ended = None
        for past in self.steps.values():  # a run that ends with an error has saved its last step, but not noted it
            if past.step <= step and past.trained_at is None:
                self._end_step(past, None)
        waiting = set(parse_groups(line["waiting"]))
        for group, life in list(self.groups.items()):
            if group >= line["drawn"]:
                self.former_groups.append(replace(self.groups.pop(group), discarded=why))
            elif group in waiting:
                self._return_to_pool(life, why)
            elif life.state == "waiting" or (life.trained_by or 0) > step:
                life.trained_by, life.dropped, life.dropped_at = None, "lost at a restart", at
            life.replayed_by = [number for number in life.replayed_by if number <= step]
        for group in waiting - self.groups.keys():
            self.groups[group] = GroupLife(group)
        self._discard_steps(step, why)

    def _return_to_pool(self, life: GroupLife, why: str) -> None:
        """Let a group wait again; what happened to it after the checkpoint becomes a former life."""
        if life.taken_by is not None or life.dropped:
            self.former_groups.append(replace(life, discarded=why))
        life.taken_at = life.taken_by = life.trained_at = life.trained_by = life.dropped_at = life.dropped = None

    def _read_rewound(self, line: dict[str, Any]) -> None:
        step, at = line["step"], line["at"]
        why = f"the run was rolled back at {format_time(at)}, and went on after step {step}"
        self.restarts.append(why)
        for life in self.groups.values():
            if life.state == "waiting" or (life.state == "trained" and (life.trained_by or 0) > step):
                life.trained_at, life.trained_by, life.dropped, life.dropped_at = None, None, "rolled back", at
        self._discard_steps(step, why)

    def _discard_steps(self, last: int, why: str) -> None:
        for step in [step for step in self.steps if step > last]:
            self.former_steps.append(replace(self.steps.pop(step), discarded=why))


def format_time(seconds: float) -> str:
    """Write seconds since the journal began; from 100 s on with minutes and hours."""
    if seconds < 100:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
