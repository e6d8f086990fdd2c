"""The order in which the rows of one source are drawn, epoch after epoch: shuffled as a whole, or within a window."""

from __future__ import annotations

import hashlib
import json
import logging
from abc import abstractmethod
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Protocol

from coalign.data.examples import MARKS, Example, RowEncoder
from coalign.data.shuffle import DataPhase, permute
from coalign.data.sources import START, FileRows, ReadPosition, SourceRow
from coalign.types import SOURCE_KEY, Stat, Stats, Total

log = logging.getLogger(__name__)


class SourceScan:
    """Reads all rows (of ``phase``) and yields the usable ones: (row number, examples).

    After the last row, ``tokens`` and ``hash`` cover everything that was yielded.
    """

    def __init__(self, encoder: RowEncoder, rows: FileRows, phase: DataPhase | None) -> None:
        self.encoder, self.rows, self.phase = encoder, rows, phase
        self.tokens = 0
        self._digest = hashlib.blake2b(digest_size=16)

    def __iter__(self) -> Iterator[tuple[int, list[Example]]]:
        for number in range(len(self.rows)):
            if self.phase is not None and number not in self.phase:
                continue
            if (examples := self.encoder.use(self.rows.entry(number))) is not None:
                for example in examples:
                    self._add(example)
                yield number, examples

    @property
    def hash(self) -> str:
        return self._digest.hexdigest()

    def _add(self, example: Example) -> None:
        self.tokens += len(example.tokens)
        self._digest.update(array("i", example.tokens).tobytes())
        row = {key: value for key, value in example.row.items() if key not in (*MARKS, SOURCE_KEY)}
        text = json.dumps([row, example.columns], sort_keys=True, default=lambda value: type(value).__name__)
        self._digest.update(text.encode())
        for span in example.images or ():
            self._digest.update(span.image.encode())


class _ScannedRows(Protocol):
    """A source of known size: item i holds the examples of usable row i, in file order.

    ``tokens`` of all rows. ``report`` says how many rows are used, ``fingerprint`` tells a checkpoint which data these
    were: "name", "rows" and "hash", as JSON values.
    """

    name: str
    tokens: int

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> list[Example]: ...

    def report(self) -> str: ...

    def fingerprint(self) -> dict[str, Any]: ...


class FileSource(_ScannedRows):
    """Base of sources that read rows of files. Its encoder has counted all rows when it is initialised."""

    def __init__(self, encoder: RowEncoder, rows: FileRows, phase: DataPhase | None, tokens: int, hash: str) -> None:
        """ValueError if no row is usable. Logs the encoder's warning about the rows."""
        self.name, self.tokens, self._hash = encoder.name, tokens, hash
        self._encoder, self._rows, self._phase = encoder, rows, phase
        if not len(self):
            raise ValueError(f"{self.name} has no usable rows {encoder.describe_emptiness(self.report())}")
        if warning := encoder.warning():
            log.warning("%s: %s", self.name, warning)

    def report(self) -> str:
        """Summarise how many rows are used: "7473 rows: 7470 used, 2 empty, 1 over 1024 tokens"."""
        rows = f"{len(self._rows)} rows"
        if self._phase is not None:
            rows = f"{self._encoder.counts['rows']} of {rows} (phase {self._phase.name})"
        return f"{rows}: {self._encoder.report()}"

    def fingerprint(self) -> dict[str, Any]:
        """The source's name, its number of usable rows, and a hash of their contents and tokens."""
        return {"name": self.name, "rows": len(self), "hash": self._hash}


class ScannedSource(FileSource):
    """Reads and tokenises all rows once when it opens, so that its usable rows are known before the first step.

    Only row numbers are kept; a row is tokenised again when it is drawn.
    """

    def __init__(self, encoder: RowEncoder, rows: FileRows, phase: DataPhase | None = None) -> None:
        """ValueError for a row that may not be dropped, and if no row is usable."""
        scan = SourceScan(encoder, rows, phase)
        self._used = array("q", (number for number, _ in scan))
        super().__init__(encoder, rows, phase, scan.tokens, scan.hash)

    def __len__(self) -> int:
        return len(self._used)

    def __getitem__(self, index: int) -> list[Example]:
        number = self._used[index]
        return self._encoder.read(self._rows[number], number)


class ShuffledOrder:
    """Draws from a source of known size; each epoch has its own permutation, given by ``key`` and its number.

    With the key None, rows are drawn in file order. ``rows`` and ``tokens`` are those of an epoch.
    """

    def __init__(self, source: _ScannedRows, key: tuple[int, ...] | None) -> None:
        self.source, self._key = source, key
        self.name, self.rows, self.tokens = source.name, len(source), source.tokens
        self._taken = 0

    def next(self) -> list[Example]:
        """Draw the next row."""
        epoch, position = divmod(self._taken, self.rows)
        self._taken += 1
        return self.source[position if self._key is None else permute(position, self.rows, *self._key, epoch)]

    def once(self) -> Iterator[list[Example]]:
        """Yield all usable rows in file order, without moving the cursor."""
        return (self.source[i] for i in range(self.rows))

    def report(self) -> str:
        return self.source.report()

    def stats(self) -> Stats:
        """`data/epoch`, the passes over the source so far; for a stream also `data/dropped`."""
        return {"data/epoch": Stat(self._taken / self.rows)}

    def state_dict(self) -> dict[str, Any]:
        """The cursor and a fingerprint of the data, as JSON values."""
        return {**self.source.fingerprint(), "stream": False, "shuffle": self._key is not None, "taken": self._taken}

    def load_state_dict(self, state: dict[str, Any], *, allow_changed: bool = False) -> None:
        """Continue after as many rows as ``state`` had taken. ValueError if the order differs, or unallowed data."""
        now = self.source.fingerprint()
        check_same_settings(state, {"stream": False, "shuffle": self._key is not None})
        if (state["rows"], state["hash"]) != (now["rows"], now["hash"]):
            _report_change(
                f"{self.name} is not the data that the checkpoint was made with: {state['rows']} usable rows of "
                f"{state['name']} then, {now['rows']} now, or other content, tokenizer or template",
                allow_changed,
            )
        self._taken = state["taken"]


class StreamedOrder:
    """Draws from files while it reads them, for data that are too large to scan first.

    A row is tokenised, and used, dropped or refused, when it is drawn. The next ``window`` rows (of ``phase``) are held
    in memory, unparsed. They are drawn in an order given by ``key``, the epoch and the window's number, or
    in file order with the key None. The cursor is the file position of the window and the number of rows drawn from it.
    """

    rows = tokens = None

    def __init__(
        self,
        encoder: RowEncoder,
        rows: FileRows,
        key: tuple[int, ...] | None,
        *,
        window: int,
        identity: str,
        phase: DataPhase | None = None,
    ) -> None:
        """``identity`` is a hash of files and settings, which is compared with a checkpoint's."""
        self.name = encoder.name
        self._encoder, self._rows, self._key, self._phase = encoder, rows, key, phase
        self._window_size, self._identity = window, identity
        self._used = 0  # rows of this epoch
        self._go_to(0, 0, START)

    def next(self) -> list[Example]:
        """Draw the next row. ValueError for a row that may not be dropped, and if an epoch has no usable row."""
        while True:
            if self._taken == len(self._window):
                self._advance()
            position = self._taken
            if self._key is not None:
                position = permute(position, len(self._window), *self._key, self._epoch, self._number)
            self._taken += 1
            first_long = self._encoder.first_long
            if (examples := self._encoder.use(self._window[position])) is not None:
                self._used += 1
                return examples
            if self._encoder.first_long != first_long:
                log.warning("%s: %s", self.name, self._encoder.describe_left_out())

    def once(self) -> Iterator[list[Example]]:
        rows = (self._encoder.use(entry) for entry, _ in self._read(START))
        return (examples for examples in rows if examples is not None)

    def report(self) -> str:
        phase = f" of phase {self._phase.name}" if self._phase else ""
        return f"a stream, {self._encoder.counts['rows']} rows{phase} so far: {self._encoder.report()}"

    def stats(self) -> Stats:
        counts = self._encoder.counts
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
            "counts": dict(self._encoder.counts),
            "written": self._rows.written,
        }

    def load_state_dict(self, state: dict[str, Any], *, allow_changed: bool = False) -> None:
        check_same_settings(state, self._settings())
        file, start, number = state["start"]
        if state["hash"] != self._identity:
            _report_change(
                f"{self.name} is not the stream that the checkpoint was made with ({state['name']}): its files, the "
                "tokenizer, the template or the keys of `data` differ",
                allow_changed,
            )
            # Bytes may have moved, so the row is found by its number.
            positions = (after for _, after in self._rows.read() if after[2] == number)
            file, start, number = START if number == 0 else next(positions, START)
        elif changed := self._rows.list_written_since(state["written"]):
            log.warning(
                "%s: written since the checkpoint: %s; samples of their contents are as before, single rows may differ",
                self.name,
                changed,
            )
        self._go_to(state["epoch"], state["window"], (file, start, number))
        self._taken, self._used = min(state["taken"], len(self._window)), state["used"]
        self._encoder.counts = Counter(state["counts"])

    def _settings(self) -> dict[str, Any]:
        return {"stream": True, "shuffle": self._key is not None, "stream_window": self._window_size}

    def _go_to(self, epoch: int, number: int, start: ReadPosition) -> None:
        """Fill window ``number`` of the epoch, which begins at ``start``."""
        self._epoch, self._number, self._start = epoch, number, start
        self._reading = self._read(start)
        self._fill()

    def _advance(self) -> None:
        """Go to the next window, or to the first one of the next epoch."""
        if self._window:
            self._number, self._start = self._number + 1, self._after
            self._fill()
        if not self._window:
            if not self._used:
                raise ValueError(f"{self.name} has no usable rows {self._encoder.describe_emptiness(self.report())}")
            self._used = 0
            self._go_to(self._epoch + 1, 0, START)

    def _fill(self) -> None:
        entries = list(islice(self._reading, self._window_size))
        self._window = [entry for entry, _ in entries]
        self._after = entries[-1][1] if entries else self._start
        self._taken = 0

    def _read(self, start: ReadPosition) -> Iterator[tuple[SourceRow, ReadPosition]]:
        return ((e, after) for e, after in self._rows.read(start) if self._phase is None or e.number in self._phase)


DrawOrder = ShuffledOrder | StreamedOrder


def _report_change(problem: str, allowed: bool) -> None:
    """Log that a checkpoint was made with other data. ValueError unless that is ``allowed``."""
    if not allowed:
        raise ValueError(
            f"{problem}. Restore it, start a new run, or allow it with `runtime.allow_changed: [data]`: the run then "
            "goes on at the same row of the data as they are now"
        )
    log.warning("%s; the run goes on at the same row", problem)


def check_same_settings(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise ValueError for a setting that has another value in a checkpoint."""
    for key, value in current.items():
        if saved[key] != value:
            raise ValueError(f"the checkpoint was made with {key}={saved[key]}, not {value}: the order would differ")
