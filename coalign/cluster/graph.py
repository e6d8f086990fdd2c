"""What a flow does, as a graph: calls, and the columns that run from one to the next."""

from __future__ import annotations

from dataclasses import dataclass, field

from coalign.data.batch import Batch


@dataclass(frozen=True)
class Call:
    """One call: the columns it reads, by the call that made them, and those it makes.

    ``batch`` is its stand-in input with all columns merged (None for a call without one).
    """

    label: str
    reads: dict[str, tuple[str, ...]]
    makes: tuple[str, ...]
    batch: Batch | None = field(default=None, repr=False, compare=False)


@dataclass
class Graph:
    """The calls in the order in which the flow made them; labels are unique (`gae`, `gae#2`)."""

    calls: list[Call] = field(default_factory=list)

    def add(self, label: str, reads: dict[str, list[str]], makes: list[str], batch: Batch | None = None) -> str:
        """Record a call; the label it got."""
        count = sum(call.label.partition("#")[0] == label for call in self.calls)
        label = f"{label}#{count + 1}" if count else label
        self.calls.append(Call(label, {source: tuple(names) for source, names in reads.items()}, tuple(makes), batch))
        return label

    @property
    def edges(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """(from, to, columns)"""
        return [(source, call.label, names) for call in self.calls for source, names in call.reads.items()]


def draw(graph: Graph) -> str:
    """The graph as text: a paragraph for each call, what it reads and from where, what it makes."""
    width = max((len(source) for source, _, _ in graph.edges), default=0)
    lines = []
    for call in graph.calls:
        lines.append(call.label)
        lines += [f"  ├─◀ {source:<{width}}  {', '.join(names)}" for source, names in call.reads.items()]
        lines.append(f"  └─▶ {', '.join(call.makes) or 'metrics'}")
    return "\n".join(lines)
