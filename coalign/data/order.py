"""The order in which the rows of one source are drawn, without end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from coalign.data.examples import Example
from coalign.data.scan import ExampleSource
from coalign.data.shuffle import permute
from coalign.types import Stat, Stats


class DrawOrder(Protocol):
    """Draws the rows of a source, one epoch after the other.

    ``rows`` and ``tokens`` are those of an epoch; None where nobody knows them.
    """

    name: str
    rows: int | None
    tokens: int | None

    def next(self) -> list[Example]:
        """What the next row becomes."""
        ...

    def once(self) -> Iterator[list[Example]]:
        """Every usable row once, as the files have them. Leaves the cursor alone."""
        ...

    def report(self) -> str:
        """What became of the rows."""
        ...

    def stats(self) -> Stats:
        """`data/epoch`: passes over the source so far; whatever else changes as it is drawn from."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The cursor, and what the data looked like. JSON can hold it."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken. ValueError if the data are not the same."""
        ...


class ShuffledOrder:
    """An Order that knows its rows: each epoch in an order of its own, which follows from ``key`` and its number.

    The key None leaves the rows in file order.
    """

    def __init__(self, source: ExampleSource, key: tuple[int, ...] | None) -> None:
        self.source, self._key = source, key
        self.name, self.rows, self.tokens = source.name, len(source), source.tokens
        self._taken = 0

    def next(self) -> list[Example]:
        epoch, place = divmod(self._taken, self.rows)
        self._taken += 1
        return self.source[place if self._key is None else permute(place, self.rows, *self._key, epoch)]

    def once(self) -> Iterator[list[Example]]:
        return (self.source[i] for i in range(self.rows))

    def report(self) -> str:
        return self.source.report()

    def stats(self) -> Stats:
        return {"data/epoch": Stat(self._taken / self.rows)}

    def state_dict(self) -> dict[str, Any]:
        return {**self.source.fingerprint(), "stream": False, "shuffle": self._key is not None, "taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        now = self.source.fingerprint()
        check_same_settings(state, {"stream": False, "shuffle": self._key is not None})
        if (state["rows"], state["hash"]) != (now["rows"], now["hash"]):
            raise ValueError(
                f"{self.name} is not the data that the checkpoint was made with: {state['rows']} usable rows of "
                f"{state['name']} then, {now['rows']} now, or other content, tokenizer or template; "
                "restore it or start a new run"
            )
        self._taken = state["taken"]


def check_same_settings(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """ValueError for a setting of ``now`` that a checkpoint was made with another value of."""
    for key, value in now.items():
        if then[key] != value:
            raise ValueError(f"the checkpoint was made with {key}={then[key]}, not {value}: the order would differ")
