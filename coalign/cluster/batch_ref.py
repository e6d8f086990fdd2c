"""References to batches of other processes, and what a worker says of its result.

The driver never holds the rows of a batch. A BatchRef says where they are stored, how long they are and how they are
grouped; that is enough to split the batch and to pass it on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from coalign.data.batch import Batch, check_same_lengths
from coalign.types import Stats, Status, Total

ROW_FIELDS = ("group", "work", "status")  # optional columns that the driver keeps, as fields of BatchRef and Meta


class Store(Protocol):
    """Stores payloads in this process's memory or in Ray's object store.

    References are opaque; the payload is freed when the last reference is dropped.
    """

    in_process: bool  # True: readers get the same live object, nothing is copied

    def put(self, value: Any) -> Any:
        """Store a batch or any other value; returns its reference."""
        ...

    def get(self, ref: Any) -> Any:
        """Return the value behind a reference made by ``put``."""
        ...

    def rows(self, ref: Any, rows: np.ndarray) -> Batch:
        """Return the sequences ``rows`` (i64) of a stored batch, in this order."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerRows:
    """The rows that a worker gets: row i is row ``rows[i]`` of ``payloads[which[i]]`` (i64[N] both).

    ``update`` i32[N], if given, becomes a column of the batch.
    """

    payloads: tuple[Any, ...]
    which: np.ndarray
    rows: np.ndarray
    update: np.ndarray | None = None

    def gather(self, store: Store) -> Batch:
        """Fetch the rows as a batch, in their order."""
        if len(self.payloads) == 1 and not isinstance(self.payloads[0], _PayloadJoin):
            batch = store.rows(self.payloads[0], self.rows)
            return batch if self.update is None else batch.with_(update=torch.tensor(self.update))
        by_payload = np.argsort(self.which, kind="stable")
        cuts = np.searchsorted(self.which[by_payload], np.arange(1, len(self.payloads)))
        rows = np.split(self.rows[by_payload], cuts)
        pairs = zip(self.payloads, rows, strict=True)
        batch = Batch.concat(
            [p.gather(store, some) if isinstance(p, _PayloadJoin) else store.rows(p, some) for p, some in pairs]
        )
        batch = batch.select(torch.from_numpy(np.argsort(by_payload))) if len(self.payloads) > 1 else batch
        return batch if self.update is None else batch.with_(update=torch.tensor(self.update))


@dataclass(frozen=True, slots=True)
class _PayloadJoin:
    """A payload whose columns are stored in several batches of the same sequences; a later column replaces an earlier
    one of the same name."""

    sources: tuple[WorkerRows, ...]

    def gather(self, store: Store, rows: np.ndarray) -> Batch:
        """Fetch the sequences ``rows`` (i64), in this order."""
        batches = []
        for source in self.sources:
            payloads, which = source.payloads, source.which[rows]
            if len(payloads) > 1:  # those that no row needs may be stored on another node
                used, which = np.unique(which, return_inverse=True)
                payloads = tuple(payloads[number] for number in used) or payloads[:1]
            batches.append(WorkerRows(payloads, which, source.rows[rows]).gather(store))
        return Batch.merge(batches)


@dataclass(frozen=True)
class BatchRef:
    """A reference to a batch in a Store: row i is row ``rows[i]`` of ``payloads[which[i]]`` (i64[N] both).

    ``lengths`` i64[N]; ``group`` i64[N] and ``status`` u8[N] (None without that column); ``work`` i64[N] is the
    relative cost of generating from each row (None: the same for all).

    Example: the first ten sequences, fetched into this process: ``ref.slice(0, 10).fetch()``.
    """

    payloads: tuple[Any, ...] = field(repr=False)
    which: Tensor = field(repr=False)
    rows: Tensor = field(repr=False)
    lengths: Tensor = field(repr=False)
    group: Tensor | None = field(repr=False)
    columns: tuple[str, ...]
    store: Store = field(repr=False)
    work: Tensor | None = field(default=None, repr=False)
    status: Tensor | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens_total(self) -> int:
        return int(self.lengths.sum())

    @staticmethod
    def of(meta: Meta, payload: Any, store: Store) -> BatchRef:
        """Refer to a complete stored batch, by its description."""
        assert meta.lengths is not None, "the description of a batch has its lengths"
        rows, lengths = torch.arange(len(meta.lengths)), meta.lengths
        which = torch.zeros_like(rows)
        return BatchRef((payload,), which, rows, lengths, meta.group, meta.columns, store, meta.work, meta.status)

    @property
    def worker_rows(self) -> WorkerRows:
        return WorkerRows(self.payloads, self.which.numpy(), self.rows.numpy())

    def slice(self, start: int, stop: int) -> BatchRef:
        """Sequences start..stop-1, nothing moved."""
        return self.select(slice(start, stop))

    def select(self, rows: Tensor | slice) -> BatchRef:
        """The sequences ``rows`` (i64, in any order), nothing moved. An empty selection keeps the columns."""
        used, which = torch.unique(self.which[rows], return_inverse=True)
        payloads = tuple(self.payloads[number] for number in used.tolist()) or self.payloads[:1]
        fields = {name: None if (values := getattr(self, name)) is None else values[rows] for name in ROW_FIELDS}
        return replace(self, payloads=payloads, which=which, rows=self.rows[rows], lengths=self.lengths[rows], **fields)

    def fetch(self, rows: int | None = None) -> Batch:
        """Fetch the first ``rows`` sequences (None: all) into this process."""
        wanted = self if rows is None else self.slice(0, min(rows, len(self)))
        return wanted.worker_rows.gather(self.store)

    @staticmethod
    def concat(refs: list[BatchRef]) -> BatchRef:
        """Concatenate batches. Empty ones, which may lack columns, are skipped unless all are empty."""
        refs = [ref for ref in refs if len(ref)] or refs[:1]
        if len(refs) == 1:
            return refs[0]
        number = {id(payload): payload for ref in refs for payload in ref.payloads}
        at = {key: index for index, key in enumerate(number)}
        fields = {name: [getattr(ref, name) for ref in refs] for name in ROW_FIELDS}
        return BatchRef(
            tuple(number.values()),
            torch.cat([torch.tensor([at[id(payload)] for payload in ref.payloads])[ref.which] for ref in refs]),
            torch.cat([ref.rows for ref in refs]),
            torch.cat([ref.lengths for ref in refs]),
            columns=refs[0].columns,
            store=refs[0].store,
            **{name: None if any(v is None for v in values) else torch.cat(values) for name, values in fields.items()},
        )

    @staticmethod
    def join(refs: list[BatchRef]) -> BatchRef:
        """Combine the columns of batches of the same sequences; nothing moved. ValueError if they differ.

        A later column replaces an earlier one of the same name.
        """
        refs = [*{id(ref): ref for ref in refs}.values()]
        base = refs[0]
        for position, ref in enumerate(refs[1:], start=2):
            check_same_lengths(base.lengths, ref.lengths, position)
        if len(refs) == 1:
            return base
        payload = _PayloadJoin(tuple(ref.worker_rows for ref in refs))
        fields = {name: values for name in ROW_FIELDS for ref in refs if (values := getattr(ref, name)) is not None}
        columns = tuple(dict.fromkeys(name for ref in refs for name in ref.columns))
        return BatchRef.of(Meta(base.lengths, columns=columns, **fields), payload, base.store)

    def without_errors(self) -> tuple[BatchRef, Stats]:
        """Leave out the rows whose status is ERROR, nothing moved; their number is the metric `samples/dropped`."""
        if self.status is None:
            return self, {}
        good = self.status != Status.ERROR
        return self if bool(good.all()) else self.select(good), {"samples/dropped": Total(float((~good).sum()))}


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """An exception of a worker as text, and as ``exception`` if it could be pickled."""

    error_type: str
    message: str
    traceback: str
    exception: BaseException | None = None


@dataclass(frozen=True, slots=True)
class DeviceMemoryUse:
    """Device memory of one process, in bytes by model and component.

    ``on_host``: bytes that components on the host would need on the device (none for generators that move themselves).
    ``baseline`` and ``peak`` are the bytes of all models before a call and at its peak.
    """

    on_device: Mapping[str, Mapping[str, int]]
    on_host: Mapping[str, Mapping[str, int]]
    baseline: int
    peak: int


@dataclass(frozen=True, slots=True)
class Meta:
    """Describes one worker's result to the driver; small, whatever the size of the payload.

    ``lengths`` i64[N], ``group`` i64[N], ``work`` i64[N], ``status`` u8[N] and ``columns`` describe the stored batch
    (None or empty without one). ``stats`` is None unless the call returned some; ``value`` is a plain result. ``verb``
    started at ``start`` (seconds since the epoch, by the worker's clock) and took ``seconds``. ``memory`` is the
    process's peak in bytes (the device's, if the module computes on one).
    """

    lengths: Tensor | None = None
    group: Tensor | None = None
    work: Tensor | None = None
    status: Tensor | None = None
    columns: tuple[str, ...] = ()
    stats: Stats | None = None
    value: Any = None
    verb: str = ""
    start: float = 0.0
    seconds: float = 0.0
    memory: int = 0
    use: DeviceMemoryUse | None = None  # None unless the device memory is managed (coalign.cluster.residency)
    failure: WorkerFailure | None = None

    @staticmethod
    def of(batch: Batch, stats: Stats | None = None) -> Meta:
        """Describe a batch that is about to be stored."""
        factors = [batch[name].long() for name in ("expected_tokens", "samples") if name in batch]
        work = torch.stack(factors).prod(0) if factors else None
        columns = (*batch.token, *batch.sequence)
        return Meta(batch.lengths, batch.get("group"), work, batch.get("status"), columns, stats)
