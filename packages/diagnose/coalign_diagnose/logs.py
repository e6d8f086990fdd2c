"""Log files as numbered lines: which of them match an expression, who wrote a line, and when."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property

import numpy as np

_WIDEST = 4096  # bytes; what is longer is read as several lines of one number
_TIME_REACH = 60  # lines before and after one without a time, in which one is looked for

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
_TAG = re.compile(
    r"""(?:
      \[rank[ ]?(?P<rank>\d+)\]:?[ ]?                                       # torch: [rank3]:
    | \[default(?P<local>\d+)\]:[ ]?                                        # torchrun --tee
    | \[\d+,(?P<mpi>\d+)\]<std(?:out|err)>:[ ]?                             # mpirun --tag-output
    | \((?P<actor>[^()=]{1,80}?)?[ ]?pid=(?P<pid>\d+)(?:,\s*ip=(?P<ip>[\w.:]+))?[^)]{0,60}\)[ ]?  # Ray, vLLM
    | \((?P<daemon>raylet|autoscaler|gcs_server)(?:,\s*ip=(?P<ip2>[\w.]+))?[^)]{0,40}\)[ ]?
    | (?P<task>\d{1,4}):[ ]                                                 # srun --label
    | (?!python)(?P<host>[a-z][a-z0-9.-]*\d[a-z0-9-]*|\d+\.\d+\.\d+\.\d+):[ ]+  # pdsh
    | [\w.-]{1,60}[ ]+\|[ ]                                                 # docker compose
    | \d{4}-\d\d-\d\dT[\d:.,]+(?:Z|[+-]\d\d:?\d\d)[ ](?:std(?:out|err)[ ][FP][ ])?  # Kubernetes
    | (?:DEBUG|INFO|WARNING|ERROR|CRITICAL)[ ]+\d\d-\d\d[ ][\d:.,]+[ ]+\[?[\w./]+:\d+\]?[ ]  # vLLM
    | \[\d+\][ ](?=\S)
    | \[\d{4}-\d\d-\d\d[ T][\d:.,]+\][ ](?!\[)
    )""",
    re.VERBOSE,
)
_REPEATED = re.compile(r" \[repeated \d+x across cluster\][^\[]{0,120}$")  # Ray's, with a hint where to turn it off
_NAME_RANK = re.compile(r"rank[_-]?(\d+)|(?:^|/)(\d+)/std(?:err|out)")
_NAME_NODE = re.compile(r"(?:^|[/_.-])((?:node|host)[_-]?\w*\d)")
_MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
_TIMES = (
    re.compile(r"(?P<Y>\d{4})[-/](?P<m>\d\d)[-/](?P<d>\d\d)[T _](?P<H>\d\d):(?P<M>\d\d):(?P<S>\d\d(?:[.,]\d{1,6})?)"),
    re.compile(r"\b[EWIF](?P<m>\d{1,2})(?P<d>\d\d) (?P<H>\d\d):(?P<M>\d\d):(?P<S>\d\d\.\d{1,6})"),  # glog, torch
    re.compile(r"(?P<b>[A-Z][a-z]{2}) +(?P<d>\d{1,2}) (?P<H>\d\d):(?P<M>\d\d):(?P<S>\d\d)(?: (?P<Y>\d{4}))?"),  # syslog
    re.compile(r"^(?P<H>\d\d):(?P<M>\d\d):(?P<S>\d\d(?:[.,]\d{1,6})?)\b"),  # no date
    re.compile(r"\b(?P<m>\d\d)[-/](?P<d>\d\d) (?P<H>\d\d):(?P<M>\d\d):(?P<S>\d\d(?:[.,]\d{1,6})?)"),  # vLLM
)


@dataclass(frozen=True)
class LineOrigin:
    """Who wrote a line, as far as tags and file names say it."""

    rank: int | None = None
    node: str | None = None
    actor: str | None = None
    pid: str | None = None

    def __str__(self) -> str:
        who = f"rank {self.rank}" if self.rank is not None else ""
        process = " ".join(filter(None, (self.actor, f"process {self.pid}" if self.pid else "")))
        text = " ".join(filter(None, (who, f"({process})" if who and process else process)))
        return f"{text or 'a process'} on {self.node}" if self.node else text

    def fill(self, fallback: LineOrigin) -> LineOrigin:
        """Return this with what it lacks taken from another one."""
        missing = {
            name: getattr(fallback, name) for name in ("rank", "node", "actor", "pid") if getattr(self, name) is None
        }
        return replace(self, **missing)


NOBODY = LineOrigin()  # a line without tags


class LogFile:
    """A text that was read whole. Lines end at newlines and at carriage returns (progress bars).

    ``name`` is how it is called in the answer; ``year`` is that of lines which name none.
    """

    def __init__(self, name: str, data: bytes, year: int | None = None) -> None:
        self.name, self.data, self.year = name, data, year
        codes = np.frombuffer(data, np.uint8)
        self._newlines = np.flatnonzero(codes == 10)
        breaks = np.union1d(self._newlines, np.flatnonzero(codes == 13)) if b"\r" in data else self._newlines
        starts = np.concatenate(([0], breaks + 1, [len(data)])).astype(np.int64)
        if len(wide := np.flatnonzero(np.diff(starts) > _WIDEST)):
            extra = [np.arange(starts[i], starts[i + 1], _WIDEST) for i in wide]
            starts = np.union1d(starts, np.concatenate(extra))
        self._starts = starts[:-1] if len(starts) > 1 and starts[-2] == starts[-1] else starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    def find(self, expression: str, ignore_case: bool = False) -> Iterator[int]:
        """Return the lines that match an expression in RE2's syntax, in one pass over the bytes.

        ``ignore_case``: the expression is in lower case, and is compared with the text in lower case.
        """
        import pyarrow
        import pyarrow.compute

        if not len(self):
            return iter(())
        data = self.data.lower() if ignore_case else self.data
        buffers = [None, pyarrow.py_buffer(self._starts), pyarrow.py_buffer(data)]
        lines = pyarrow.LargeBinaryArray.from_buffers(pyarrow.large_binary(), len(self), buffers)
        # pyright: ignore below: pyarrow makes its functions when it is imported
        hits = pyarrow.compute.match_substring_regex(lines, expression)  # pyright: ignore[reportAttributeAccessIssue]
        return iter(np.flatnonzero(hits.to_numpy(zero_copy_only=False)).tolist())

    def read(self, line: int) -> bytes:
        return self.data[self._starts[line] : self._starts[line + 1]]

    def text(self, line: int) -> str:
        """Return a line without its end and without colours."""
        return _ESCAPES.sub("", self.read(line).decode("utf-8", "replace")).rstrip()

    def number(self, line: int) -> int:
        """Return the number of a line as editors count, from 1."""
        return int(np.searchsorted(self._newlines, self._starts[line])) + 1

    def rest(self, line: int, max_bytes: int = 1 << 20) -> str:
        """Return what follows after a line, up to ``max_bytes``."""
        start = int(self._starts[line + 1])
        return self.data[start : start + max_bytes].decode("utf-8", "replace")

    @cached_property
    def origin(self) -> LineOrigin:
        """Who wrote the file, by its name."""
        rank, node = _NAME_RANK.search(self.name), _NAME_NODE.search(self.name)
        return LineOrigin(int(rank[1] or rank[2]) if rank else None, node[1] if node else None)

    def time(self, line: int) -> float | None:
        """Return when a line was written, in seconds; a line without a time has that of the nearest one that has."""
        for neighbour in (
            *range(line, max(line - _TIME_REACH, -1), -1),
            *range(line + 1, min(line + _TIME_REACH, len(self))),
        ):
            if (seconds := parse_time(self.text(neighbour)[:200], self.year)) is not None:
                return seconds
        return None


def split_tags(text: str) -> tuple[LineOrigin, str]:
    """Return who wrote a line by the tags it begins with, and the line without them."""
    origin = LineOrigin()
    for _ in range(4):
        tag = _TAG.match(text)
        if tag is None:
            break
        rank = tag["rank"] or tag["mpi"] or tag["task"]
        actor = tag["actor"] or tag["daemon"]
        tag_origin = LineOrigin(
            int(rank) if rank else None, tag["ip"] or tag["ip2"] or tag["host"], actor and actor.strip(), tag["pid"]
        )
        origin, text = origin.fill(tag_origin), text[tag.end() :]
    return origin, _REPEATED.sub("", text)


def parse_time(text: str, year: int | None = None) -> float | None:
    """Return the first time in a text (ISO, glog, torch, vLLM, syslog), in seconds since the epoch."""
    for pattern in _TIMES:
        if match := pattern.search(text):
            fields = match.groupdict()
            try:
                month = _MONTHS.index(fields["b"]) + 1 if fields.get("b") else int(fields.get("m") or 1)
                seconds = float(fields["S"].replace(",", "."))
                date = int(fields.get("Y") or year or 2000), month, int(fields.get("d") or 1)
                day = datetime(*date, int(fields["H"]), int(fields["M"]))
            except ValueError:
                continue
            return day.timestamp() + seconds
    return None
