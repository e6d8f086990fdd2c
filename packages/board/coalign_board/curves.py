"""Curves of a metrics.jsonl of any length, in little memory: the least, mean and greatest value of buckets of steps.

A bucket begins as one step. When there are too many, two become one, so a long run has wide buckets and no spike is
lost. Where each bucket begins in the file is known, so a part of a curve can be read again step by step.
"""

from __future__ import annotations

import json
import math
import time
from array import array
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from coalign.run_files.records import is_number, is_record, parse_record
from coalign_board.following import START, FilePosition, read_growth

MOST_BUCKETS = 1024  # then two become one
FEWEST_BUCKETS = 256  # a part of a curve with fewer buckets is read again, step by step
_CHUNK = 1 << 18  # bytes that are parsed at once
_DECODE = json.JSONDecoder(parse_constant=lambda _: None).decode


class BucketSeries:
    """The values of one metric: ``count``, ``total``, ``low`` and ``high`` of each bucket, and ``holes``.

    A hole is a value that was NaN or infinite: metrics.jsonl says null.
    """

    def __init__(self) -> None:
        self.count = array("I")
        self.total = array("d")
        self.low = array("d")
        self.high = array("d")
        self.holes = array("I")

    def add(self, bucket: int, values: Sequence[Any]) -> None:
        """Add values to a bucket; those that are no finite numbers are holes."""
        if (missing := bucket + 1 - len(self.count)) > 0:
            self.count.extend([0] * missing)
            self.total.extend([0.0] * missing)
            self.low.extend([math.inf] * missing)
            self.high.extend([-math.inf] * missing)
            self.holes.extend([0] * missing)
        try:
            total = float(sum(values))
        except (TypeError, OverflowError):
            total = math.nan
        if not math.isfinite(total):
            finite = [value for value in values if is_number(value)]
            self.holes[bucket] += len(values) - len(finite)
            if not finite:
                return
            values, total = finite, math.fsum(finite)
        self.count[bucket] += len(values)
        self.total[bucket] += total
        self.low[bucket] = min(self.low[bucket], min(values))
        self.high[bucket] = max(self.high[bucket], max(values))

    def halve(self) -> None:
        """Make one bucket of each two."""
        self.count = array("I", _pair(self.count, sum))
        self.total = array("d", _pair(self.total, sum))
        self.low = array("d", _pair(self.low, min))
        self.high = array("d", _pair(self.high, max))
        self.holes = array("I", _pair(self.holes, sum))

    def select(self, start: int, end: int, *, is_exact: bool) -> dict[str, list[Any]]:
        """Return `mean`, `low` and `high` of the buckets ``start`` to ``end``; `mean` alone if they are single steps.

        `holes` are the numbers of the buckets that have one.
        """
        chosen = range(start, min(end, len(self.count)))
        rest = [None] * (end - max(start, len(self.count)))
        series: dict[str, list[Any]] = {
            "mean": [round_value(self.total[i] / self.count[i]) if self.count[i] else None for i in chosen] + rest,
            "holes": [i for i in chosen if self.holes[i]],
        }
        if not is_exact:
            series["low"] = [round_value(self.low[i]) for i in chosen] + rest
            series["high"] = [round_value(self.high[i]) for i in chosen] + rest
        return series


class MetricCurves:
    """The curves of a metrics.jsonl, read as far as `read` has come.

    ``steps``, ``tokens`` and ``seconds`` are the last step of each bucket, the tokens trained on until then, and the
    run's seconds. ``latest`` holds the newest value of each metric. ``generation`` counts how often the file was
    replaced by another one, as a resumed run does; then all is read again.
    """

    def __init__(self, path: Path, names: Collection[str] | None = None) -> None:
        self.path = path
        self.generation = -1
        self._names = names  # metrics to keep; None: all
        self._position = START
        self._clear()

    def _clear(self) -> None:
        self.generation += 1
        self.width = 1  # steps of a bucket
        self.first: int | None = None  # the first step of the first bucket
        self.newest = -1
        self.skipped = 0  # lines that hold no step
        self.steps = array("q")
        self.tokens = array("d")
        self.seconds = array("d")
        self.series: dict[str, BucketSeries] = {}
        self.latest: dict[str, Any] = {}
        self._offsets = array("q")  # where the first line of each bucket begins, -1 for one without lines
        self._tokens = self._seconds = 0.0

    @property
    def bytes_read(self) -> int:
        return self._position.offset

    def read(self, seconds: float = math.inf, end: float = math.inf) -> bool:
        """Read on for about ``seconds``, or to the byte ``end``; return whether everything complete was read.

        Raises OSError if the file cannot be read.
        """
        deadline = time.monotonic() + seconds
        while self._position.offset < end:
            chunk = int(min(_CHUNK, end - self._position.offset))
            growth = read_growth(self.path, self._position, chunk)
            if growth.replaced:
                self._clear()
            offset = 0 if growth.replaced else self._position.offset
            if offset == 0 and growth.lines and self._names is None:
                self._choose_width(growth.lines)
            self._position = growth.position
            if growth.lines:
                self._add_lines(growth.lines, offset)
            elif not growth.replaced:
                return True
            if time.monotonic() > deadline:
                return False
        return True

    def find_bucket(self, step: float) -> int:
        """Return the number of the bucket that holds a step, of those that there are."""
        return max(0, min(int((step - (self.first or 0)) // self.width), len(self.steps) - 1))

    def read_part(self, names: Collection[str], first: float, last: float) -> MetricCurves:
        """Return the curves of these metrics between two steps, with buckets as narrow as they can be."""
        start, end = self.find_bucket(first), self.find_bucket(last) + 1
        detail = MetricCurves(self.path, names)
        offsets = [offset for offset in self._offsets[start:] if offset >= 0]
        after = [offset for offset in self._offsets[end:] if offset >= 0]
        if offsets:
            detail._position = FilePosition(self._position.inode, offsets[0])
            if start:
                detail._tokens, detail._seconds = self.tokens[start - 1], self.seconds[start - 1]
            detail.read(end=after[0] if after else self._position.offset)
        return detail

    def _add_lines(self, lines: list[bytes], offset: int) -> None:
        records, offsets = [], []
        parsed = _parse_together(lines)
        for line, record in zip(lines, parsed, strict=True):
            if record is None:
                self.skipped += bool(line.strip())
            else:
                records.append(record)
                offsets.append(offset)
            offset += len(line) + 1
        start = 0
        while start < len(records):
            bucket = self._open_bucket(records[start]["step"], offsets[start])
            limit = (self.first or 0) + (bucket + 1) * self.width
            end = start + 1
            while end < len(records) and records[start]["step"] <= records[end]["step"] < limit:
                end += 1
            self._add_bucket(bucket, records[start:end])
            start = end

    def _choose_width(self, lines: list[bytes]) -> None:
        """Begin with buckets as wide as those that the whole file will need: so a long one is read in half the time."""
        size = sum(map(len, lines)) / len(lines) + 1
        while self.path.stat().st_size / size > self.width * MOST_BUCKETS:
            self.width *= 2

    def _open_bucket(self, step: int, offset: int) -> int:
        """Return the bucket of a step; the buckets become wider until there is one."""
        if self.first is None:
            self.first = step
        bucket = max(0, (step - self.first) // self.width)
        while bucket >= MOST_BUCKETS:
            self._halve()
            bucket = (step - self.first) // self.width
        if (missing := bucket + 1 - len(self.steps)) > 0:
            self.steps.extend([-1] * missing)
            self.tokens.extend([self._tokens] * missing)
            self.seconds.extend([self._seconds] * missing)
            self._offsets.extend([-1] * missing)
        if self._offsets[bucket] < 0:
            self._offsets[bucket] = offset
        return bucket

    def _halve(self) -> None:
        self.width *= 2
        for series in self.series.values():
            series.halve()
        self.steps = array("q", _pair(self.steps, max))
        self.tokens = array("d", _pair(self.tokens, max))
        self.seconds = array("d", _pair(self.seconds, max))
        self._offsets = array("q", _pair(self._offsets, lambda pair: min((o for o in pair if o >= 0), default=-1)))

    def _add_bucket(self, bucket: int, records: list[dict[str, Any]]) -> None:
        """Add records of one bucket, column by column."""
        for name, column in _read_columns(records):
            if name == "step" or (self._names is not None and name not in self._names):
                continue
            if name not in self.series:
                self.series[name] = BucketSeries()
            self.series[name].add(bucket, column)
            self.latest[name] = column[-1]
        newest = records[-1]
        self.newest = max(self.newest, newest["step"])
        self.steps[bucket] = max(self.steps[bucket], newest["step"])
        for record in records:
            self._tokens += _read_number(record, "tokens/trained", 0.0)
            self._seconds = _read_number(record, "time/run", self._seconds + _read_number(record, "time/step", 0.0))
        self.tokens[bucket], self.seconds[bucket] = self._tokens, self._seconds


def round_value(value: float) -> float | None:
    """Return a value with six digits, which a picture does not need more of; None for what is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _parse_together(lines: list[bytes]) -> list[dict[str, Any] | None]:
    """Parse lines as one array, which is faster; one by one where that fails."""
    try:
        records = _DECODE(f"[{b','.join(lines).decode()}]")
        if len(records) == len(lines) and all(map(is_record, records)):
            return records
    except (ValueError, RecursionError):
        pass
    return [parse_record(line) for line in lines]


def _read_columns(records: list[dict[str, Any]]) -> Iterable[tuple[str, Sequence[Any]]]:
    """Return the values of each metric that any of these records has."""
    names = list(records[0])
    if all(list(record) == names for record in records):
        return zip(names, zip(*map(dict.values, records), strict=True), strict=True)
    columns: dict[str, list[Any]] = {}
    for record in records:
        for name, value in record.items():
            columns.setdefault(name, []).append(value)
    return columns.items()


def _read_number(record: dict[str, Any], name: str, default: float) -> float:
    value = record.get(name)
    return float(value) if is_number(value) else default  # pyright: ignore[reportArgumentType]


def _pair(values: array[Any], join: Any) -> list[Any]:
    return [join(values[i : i + 2]) for i in range(0, len(values), 2)]
