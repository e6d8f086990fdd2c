"""The journal of a run's rollouts: ``journal.jsonl``, a line for each event in the life of groups of samples.

A line is a JSON object whose last key is a checksum of the text before it, so that damaged lines are detected.
Groups of one bundle share a line. The driver only writes numbers that it has, and the results of ``describe_samples``
from workers. Events, each with ``at`` (seconds since the journal began):

- ``run``: the identity of the run; the first line. ``source``: a number for a source of data.
- ``drawn``: prompts were drawn for ``step`` at weight ``version``, in ``bundles`` of so many groups. ``rows`` are
  [number of the source, row] of each group. ``begun``: prompts of a checkpoint are generated again.
- ``done``: groups are complete and scored. ``samples`` has [tokens, status, reward, versions] for each sample of each
  group. ``dropped`` are those that the filter dropped.
- ``dropped``: groups were dropped for another ``cause``.
- ``taken``: ``step`` trains on groups. ``trained``: it has, with its ``loss``; ``synced`` weights were sent.
- ``restarted``: processes were lost and started again. ``ended``: the loop ended.
- ``resumed``: a run goes on after ``step``; ``drawn`` is the next group, ``waiting`` those not trained on yet.
  ``rewound``: the same without a restart, and nothing waits.
"""

from __future__ import annotations

import concurrent.futures
import json
import logging
import math
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coalign.cluster.future import Future
from coalign.data.batch import Batch
from coalign.data.examples import MARKS
from coalign.engine.rollouts.events import CollectedBundle, RolloutEvents
from coalign.engine.rollouts.pool import ReadyGroups, list_groups
from coalign.files import RecordFile, describe_problem, open_regular
from coalign.run_files.records import MAX_LINE

if TYPE_CHECKING:
    from coalign.cluster.cluster import Cluster
    from coalign.engine.environment import Environment

log = logging.getLogger(__name__)
# Counts of samples that never became a complete group -> why.
CAUSES = {"rollout/cut": "cut", "rollout/given_up": "given up", "samples/dropped": "failed"}
_CHECKSUM = ',"crc":"%08x"}'
_CHECKSUM_LENGTH = len(_CHECKSUM % 0)


def encode_line(record: dict[str, Any]) -> bytes:
    """Return a record as a line with its checksum."""
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":"), default=str)[:-1].encode()
    return text + (_CHECKSUM % zlib.crc32(text)).encode() + b"\n"


def decode_line(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line; None if it is damaged."""
    text, checksum = line[: -_CHECKSUM_LENGTH - 1], line[-_CHECKSUM_LENGTH - 1 :]
    if checksum != (_CHECKSUM % zlib.crc32(text)).encode() + b"\n":
        return None
    return json.loads(text + b"}")


def format_groups(groups: Iterable[int]) -> str:
    """Write group numbers in their order, neighbours as a range.

    Example:
        >>> format_groups([0, 1, 2, 7])
        '0-2,7'
    """
    ranges: list[list[int]] = []
    for group in groups:
        if ranges and group == ranges[-1][1] + 1:
            ranges[-1][1] = group
        else:
            ranges.append([group, group])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def parse_groups(text: str) -> list[int]:
    """Return the numbers that ``format_groups`` has written."""
    ranges = ([int(end) for end in item.split("-")] for item in text.split(",") if item)
    return list(chain.from_iterable(range(ends[0], ends[-1] + 1) for ends in ranges))


def describe_samples(batch: Batch) -> Batch:
    """Return one row without tokens for each group: its number and ``described``, a list of its samples.

    A sample is [generated tokens, status, reward or None, versions]. ``versions`` is the weight version of all its
    tokens, or [tokens up to here, version, tokens up to here, version, …].
    """
    versions = batch.get("versions")
    chosen = batch["loss_mask"] if versions is None else versions >= 0
    row = batch.segment[chosen]
    tokens = torch.bincount(row, minlength=len(batch)).tolist()
    runs = [[] for _ in range(len(batch))] if versions is None else _list_versions(versions[chosen], row, len(batch))
    status, rewards = batch.get("status"), batch.get("reward")
    statuses = [None] * len(batch) if status is None else status.tolist()
    scores = [None] * len(batch) if rewards is None else [_round(reward) for reward in rewards.tolist()]
    samples = [list(sample) for sample in zip(tokens, statuses, scores, runs, strict=True)]
    groups, sizes = torch.unique_consecutive(batch["group"], return_counts=True)
    remaining = iter(samples)
    described = [[next(remaining) for _ in range(size)] for size in sizes.tolist()]
    return Batch(torch.zeros(len(groups)), {}, {"group": groups, "described": described})


def _list_versions(versions: Tensor, row: Tensor, rows: int) -> list[Any]:
    """Return the weight versions that generated each row; ``versions`` and ``row`` have an entry for each token."""
    last = torch.ones(len(row), dtype=torch.bool)
    last[:-1] = (versions[1:] != versions[:-1]) | (row[1:] != row[:-1])
    tokens = torch.bincount(row, minlength=rows)
    starts = tokens.cumsum(0) - tokens
    ends = last.nonzero().flatten()
    runs_by_row: list[Any] = [[] for _ in range(rows)]
    for number, end, version in zip(
        row[ends].tolist(), (ends + 1 - starts[row[ends]]).tolist(), versions[ends].tolist(), strict=True
    ):
        runs_by_row[number] += [end, version]
    return [runs[1] if len(runs) == 2 else runs for runs in runs_by_row]


def _round(reward: float) -> float | None:
    """Round a reward to six digits; None for NaN and infinities, which JSON does not have."""
    return float(f"{reward:.6g}") if math.isfinite(reward) else None


class Journal(RolloutEvents):
    """Appends what happens to the groups of a run to a file, in a thread.

    ``start`` is when the journal began, in seconds since the epoch. ``unfinished`` are the groups that an earlier
    rollout has left unfinished. Samples are described in a worker of ``cluster``. Lines are written in the order noted.
    The loop waits neither for the disk nor for the description of samples.
    """

    def __init__(self, path: Path, start: float, cluster: Cluster, unfinished: Iterable[int] = ()) -> None:
        self._file = RecordFile(path)
        self._cluster = cluster
        self._start = start
        self._unfinished = set(unfinished)
        self._sources: dict[str, int] = {}
        self._writer = ThreadPoolExecutor(1, "coalign-journal")
        if path.exists() and not _ends_a_line(path):
            self._file.append(b"\n")  # a line that a kill has cut must not spoil the next one

    def note(self, event: str, **fields: Any) -> None:
        """Add one line. Fields that are None are left out."""
        present = {name: value for name, value in fields.items() if value is not None}
        self._submit(self._write, {"event": event, "at": self._since_start(time.time()), **present})

    def _submit(self, work: Callable[..., None], *arguments: Any) -> None:
        self._writer.submit(work, *arguments).add_done_callback(_report_problem)

    def close(self) -> None:
        """Wait until everything is written."""
        self._writer.shutdown()

    def drawn(self, step: int, version: int, bundles: Sequence[Batch]) -> None:
        rows = [[self._number_source(row), row.get(MARKS[1])] for bundle in bundles for row in bundle["rows"]]
        groups = format_groups(chain.from_iterable(bundle["group"].tolist() for bundle in bundles))
        sizes = [len(bundle) for bundle in bundles]
        self.note("drawn", step=step, version=version, groups=groups, bundles=sizes, rows=rows)

    def begun(self, samples: Future) -> Future:
        return self._cluster.transform(describe_samples, samples)

    def repeated(self, prompts: Batch, version: int) -> None:
        self.note("begun", version=version, groups=format_groups(prompts["group"].tolist()))

    def collected(self, bundle: CollectedBundle) -> None:
        """Note the complete and the dropped groups of a bundle, once its samples are described."""
        self._submit(self._write_collected, bundle, time.time())

    def _write_collected(self, bundle: CollectedBundle, collected: float) -> None:
        samples, at = bundle.samples, collected
        if isinstance(samples, Future):
            if samples.ended.exception() is not None:  # waits; the run ends with this error
                return
            at = max((span.start + span.seconds for span in samples.spans), default=at)
            samples = samples.result()
        described: Any = samples.fetch()
        groups: list[int] = described["group"].tolist()
        if groups:
            kept = set(bundle.kept)
            fields: dict[str, Any] = {"groups": format_groups(groups), "samples": described["described"]}
            if dropped := format_groups(group for group in groups if group not in kept):
                fields["dropped"] = dropped
            self._write({"event": "done", "at": self._since_start(at), **fields})
        left = (self._unfinished | set(bundle.prompted)) - set(groups)
        self._unfinished = left if bundle.continued is None else left & bundle.continued
        if bundle.continued is not None and left > self._unfinished:
            causes = [cause for name, cause in CAUSES.items() if name in bundle.stats and bundle.stats[name].value]
            missing = format_groups(sorted(left - self._unfinished))
            cause = " or ".join(causes) or "lost"
            self._write({"event": "dropped", "at": self._since_start(collected), "cause": cause, "groups": missing})

    def _since_start(self, at: float) -> float:
        return round(at - self._start, 3)

    def expired(self, groups: Sequence[ReadyGroups]) -> None:
        if text := format_groups(number for ready in groups for number in list_groups(ready.batch.group)):
            self.note("dropped", cause="expired", groups=text)

    def resumed(self, step: int, environment: Environment) -> None:
        waiting = format_groups(environment.list_waiting_groups())
        self.note("resumed", step=step, drawn=environment.loader.drawn, waiting=waiting)

    def taken(self, step: int, waited: Tensor | None, trained: Tensor | None) -> None:
        groups, batch = list_groups(waited), list_groups(trained)
        replayed = format_groups(sorted(set(batch) - set(groups)))
        left_out = format_groups(sorted(set(groups) - set(batch)))
        self.note(
            "taken", step=step, groups=format_groups(groups), replayed=replayed or None, left_out=left_out or None
        )

    def note_rewound(self, step: int) -> None:
        """Note that the run goes on after ``step``, and that everything since is discarded."""
        self._submit(self._unfinished.clear)
        self.note("rewound", step=step)

    def _write(self, record: dict[str, Any]) -> None:
        self._file.append(encode_line(record))

    def _number_source(self, row: dict[str, Any]) -> int:
        name = str(row.get(MARKS[0], "?"))
        if name not in self._sources:
            self._sources[name] = len(self._sources)
            self.note("source", number=self._sources[name], name=name)
        return self._sources[name]


def _report_problem(written: concurrent.futures.Future[None]) -> None:
    if problem := written.exception():  # a run without its journal is better than none
        log.error("the journal lacks an event: %s", describe_problem(problem))


def _ends_a_line(path: Path) -> bool:
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read() in (b"", b"\n")


def read_lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the record of each line, None for a damaged one. Empty lines are passed over."""
    with open_regular(path) as lines:
        while line := lines.readline(MAX_LINE):
            if line != b"\n":
                yield decode_line(line)
