"""A source read as it comes: for more rows than one waits for, or than memory holds.

Nothing is known of a row before its turn: rows are read in file order, shuffled within a window, and tokenised, used,
dropped or refused when they are drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

from coalign.data.examples import Example, RowEncoder
from coalign.data.order import check_same_settings
from coalign.data.shuffle import DataPhase, permute
from coalign.data.sources import START, FileRows, ReadPosition, SourceRow
from coalign.types import Stat, Stats, Total


class StreamedOrder:
    """An Order over a stream; at its end it begins again, shuffled anew.

    The next ``window`` rows (of ``phase``) are held in memory, as the file has them, and drawn in an order that follows
    from ``key``, the epoch and the window's number; the key None draws them in file order. The cursor is the place
    where the window starts and how much of it has been drawn.
    """

    rows = tokens = None

    def __init__(
        self,
        examples: RowEncoder,
        rows: FileRows,
        key: tuple[int, ...] | None,
        *,
        window: int,
        identity: str,
        phase: DataPhase | None = None,
    ) -> None:
        """``identity`` is a hash of what makes the stream what it is, for the checkpoint."""
        self.name = examples.name
        self._examples, self._rows, self._key, self._phase = examples, rows, key, phase
        self._most, self._identity = window, identity
        self._used = 0  # in this epoch
        self._go_to(0, 0, START)

    def next(self) -> list[Example]:
        """ValueError for a row that may not be dropped, and for an epoch without a single usable row."""
        while True:
            if self._taken == len(self._window):
                self._advance()
            place = self._taken
            if self._key is not None:
                place = permute(place, len(self._window), *self._key, self._epoch, self._number)
            self._taken += 1
            if (found := self._examples.use(self._window[place])) is not None:
                self._used += 1
                return found

    def once(self) -> Iterator[list[Example]]:
        found = (self._examples.use(entry) for entry, _ in self._mine(START))
        return (examples for examples in found if examples is not None)

    def report(self) -> str:
        counts = self._examples.counts
        whose = f" of phase {self._phase.name}" if self._phase else ""
        return f"a stream, {counts['rows']} rows{whose} so far: {self._examples.report()}"

    def stats(self) -> Stats:
        counts = self._examples.counts
        return {"data/epoch": Stat(self._epoch), "data/dropped": Total(counts["rows"] - counts["used"])}

    def state_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "hash": self._identity,
            **self._settings(),
            "epoch": self._epoch,
            "window": self._number,
            "start": list(self._start),
            "taken": self._taken,
            "used": self._used,
            "counts": dict(self._examples.counts),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_same_settings(state, self._settings())
        if state["hash"] != self._identity:
            raise ValueError(
                f"{self.name} is not the stream that the checkpoint was made with ({state['name']}): its files, the "
                "tokenizer, the template or the keys of `data` differ; restore them or start a new run"
            )
        which, start, number = state["start"]
        self._go_to(state["epoch"], state["window"], (which, start, number))
        self._taken, self._used = state["taken"], state["used"]
        self._examples.counts = Counter(state["counts"])

    def _settings(self) -> dict[str, Any]:
        return {"stream": True, "shuffle": self._key is not None, "stream_window": self._most}

    def _go_to(self, epoch: int, number: int, start: ReadPosition) -> None:
        self._epoch, self._number, self._start = epoch, number, start  # of the window
        self._reading = self._mine(start)
        self._fill()

    def _advance(self) -> None:
        """To the next window, or to the first one of the next epoch."""
        if self._window:
            self._number, self._start = self._number + 1, self._after
            self._fill()
        if not self._window:
            if not self._used:
                raise ValueError(f"{self.name} has no usable rows ({self.report()})")
            self._used = 0
            self._go_to(self._epoch + 1, 0, START)

    def _fill(self) -> None:
        found = list(islice(self._reading, self._most))
        self._window = [entry for entry, _ in found]
        self._after = found[-1][1] if found else self._start
        self._taken = 0

    def _mine(self, start: ReadPosition) -> Iterator[tuple[SourceRow, ReadPosition]]:
        return ((e, after) for e, after in self._rows.read(start) if self._phase is None or e.number in self._phase)
