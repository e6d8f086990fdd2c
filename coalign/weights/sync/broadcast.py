"""Transport between hosts: each sender broadcasts buckets to all readers, in a group of its own (weights.groups).

Two buckets of a sender are under way, so the next one is filled (and, by a reader, the last one verified and installed)
meanwhile, and all senders send at once. Readers hold a few buckets, never the model: they install as the weights come,
each tensor once it is verified. So a stream that breaks off leaves replicas that refuse to serve until the next
complete sync. Both models must be able to compute at once.

A bucket is three messages: a header i64[2] (bytes of tensors, bytes of entries), the entries, pickled, and the tensors.
The header (END, n) ends the stream; n bytes follow, a text: the error that ended it, or nothing.

torch.distributed groups between two models: one for each sender, with all readers in it.

They stand beside whatever groups a model has itself (made without torch.distributed's registry, which knows one world).
"""

from __future__ import annotations

import pickle
import queue
import threading
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from coalign.weights.sync.copying import checked, copied
from coalign.weights.sync.segment import TensorEntry, aligned
from coalign.weights.sync.transport import (
    ExportRequest,
    Sent,
    SyncedModel,
    Transport,
    WeightEndpoint,
    WeightError,
    both,
    check_names,
    damaged,
    exported,
    identity,
    installing,
    own_address,
)

Meeting = tuple[str, int] | None


@dataclass
class Link:
    """A rank's part: the group that it sends in, or those that it reads from, with ``device`` memory."""

    device: torch.device
    groups: list[Any] = field(default_factory=list)
    server: dist.TCPStore | None = None
    buffers: deque[Tensor] = field(default_factory=deque)

    def buffer(self, size: int) -> Tensor:
        """u8[size], one of two in turn: the other one is under way. Kept, since new memory costs as much as a copy."""
        oldest = self.buffers.popleft() if len(self.buffers) == 2 else None
        if oldest is None or len(oldest) < size:
            oldest = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.buffers.append(oldest)
        return oldest[:size]


def open_rendezvous(module: Any, store: Any, link: str, kind: str) -> Meeting:
    """Where readers meet this rank; None if it does not send. ``kind``: of memory, that all ranks have."""
    own = module.links[link] = Link(torch.device(module.context.device if kind == "cuda" else kind))
    if not module.exports:
        return None
    own.server = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
    return own_address(), own.server.port


def enter_group(module: Any, store: Any, link: str, readers: Sequence[Any], timeout: float) -> None:
    """A sender's way into its group, in which it is rank 0. RuntimeError if not all come within ``timeout`` s."""
    own: Link = module.links[link]
    if own.server is not None:
        own.groups = [_group(own.server, 0, 1 + len(readers), own.device, timeout)]


def enter_groups(
    module: Any, store: Any, link: str, kind: str, meetings: list[Meeting], readers: Sequence[Any], timeout: float
) -> None:
    """A reader's way into the group of every sender. RuntimeError if not all come within ``timeout`` s."""
    own = module.links[link] = Link(torch.device(module.context.device if kind == "cuda" else kind))
    rank = 1 + readers.index(identity())
    for address, port in filter(None, meetings):
        server = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout))
        own.groups.append(_group(server, rank, 1 + len(readers), own.device, timeout))


def leave_groups(module: Any, store: Any, link: str) -> None:
    """End the groups: after a failure their ranks would not agree on what comes next."""
    for group in module.links.pop(link, Link(torch.device("cpu"))).groups:
        group.shutdown()


def broadcast(group: Any, tensor: Tensor) -> Any:
    """Begin to send (as rank 0) or to receive ``tensor``: something to ``wait`` for."""
    return group.broadcast([tensor], dist.BroadcastOptions())


def _group(server: dist.TCPStore, rank: int, size: int, device: torch.device, timeout: float) -> Any:
    limit = timedelta(seconds=timeout)
    if device.type == "cpu":
        return dist.ProcessGroupGloo(server, rank, size, limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    torch.cuda.set_device(device)
    return dist.ProcessGroupNCCL(server, rank, size, options)


END = -1


class Broadcast(Transport):
    """``senders`` and ``readers``: where the ranks of the two models are. ValueError for models that take turns."""

    def __init__(
        self,
        source: SyncedModel,
        target: SyncedModel,
        config: Any,
        senders: list[WeightEndpoint],
        readers: list[WeightEndpoint],
    ) -> None:
        super().__init__(source, target, config)
        if self.in_turns:
            raise ValueError(
                f"sync.transport: `broadcast` needs {source.name} and {target.name} at once, and they take turns on "
                "their devices; use shared_memory, object_store or disk"
            )
        self.labels = [f"{source.name}, rank {rank}" for rank, place in enumerate(senders) if place.sends]
        self.readers = [place.identity for place in readers]
        self.kind = "cuda" if all(place.device.startswith("cuda") for place in [*senders, *readers]) else "cpu"
        self.link: str | None = None

    def move(self, version: int, changing: bool, expected: frozenset[str] | None) -> list[Sent]:
        if self.link is None:
            self.link = self._connect(f"broadcast {uuid.uuid4().hex}")
        size, timeout = self.config.bucket_mib * 2**20, self.config.timeout
        sending = self.source.run(send, self.link, self.wanted(changing), size, fatal=False)
        taking = self.target.run(take, self.link, self.labels, version, expected, timeout, fatal=False)
        try:
            both(taking, sending)  # what a reader says of a failure holds what its sender said
            return sending.result()
        except BaseException:
            for leaving in [model.run(leave_groups, self.link, fatal=False) for model in (self.source, self.target)]:
                with suppress(Exception):  # of a rank that is gone, say
                    leaving.result()
            self.link = None
            raise

    def _connect(self, link: str) -> str:
        meetings = self.source.run(open_rendezvous, link, self.kind, fatal=False).result()
        own = self.source.run(enter_group, link, self.readers, self.config.timeout, fatal=False)
        arguments = link, self.kind, meetings, self.readers, self.config.timeout
        both(own, self.target.run(enter_groups, *arguments, fatal=False))
        return link


# ---- a sender


def send(module: Any, store: Any, link: str, wanted: ExportRequest, size: int) -> Sent:
    """Broadcast this rank's weights."""
    own: Link = module.links[link]
    sizes: dict[str, int] = {}
    with exported(module, wanted) as weights:
        if not own.groups:
            if (item := next(weights, None)) is not None:
                raise WeightError(f"rank {module.context.rank} yields '{item[0]}', but its `exports` is False")
            return Sent({})
        outgoing = Outgoing(own, size, wanted.timeout)
        try:
            for name, tensor in weights:
                sizes[name] = tensor.nbytes
                outgoing.add(name, tensor)
            outgoing.end()
        except BaseException as problem:
            with suppress(WeightError):  # readers that cannot be told have a deadline of their own
                outgoing.end(f"{type(problem).__name__}: {problem}")
            raise
    return Sent(sizes)


class Outgoing:
    """The buckets of a sender: one is filled while another one is under way."""

    def __init__(self, link: Link, size: int, timeout: float) -> None:
        self.link, self.size, self.timeout = link, size, timeout
        self._tensors: list[tuple[TensorEntry, Tensor]] = []
        self._filled = 0
        self._under_way: deque[tuple[str, Any, Tensor]] = deque()

    def add(self, name: str, tensor: Tensor) -> None:
        if self._tensors and self._filled + tensor.nbytes > self.size:
            self._flush()
        entry = TensorEntry(name, tensor.dtype, tuple(tensor.shape), self._filled)
        self._tensors.append((entry, tensor))
        self._filled += aligned(tensor.nbytes)

    def end(self, problem: str = "") -> None:
        """Nothing follows; ``problem`` says why, if that is too early."""
        if self._tensors and not problem:
            self._flush()
        text = as_bytes(problem)
        self._post(torch.tensor([END, len(text)]), text)
        self._wait(0)

    def _flush(self) -> None:
        self._wait(3)  # the messages of one bucket
        payload = self.link.buffer(self._filled)
        jobs = ((entry, tensor, entry.bytes(payload)) for entry, tensor in self._tensors)
        entries = as_bytes(list(copied(jobs)))
        self._post(torch.tensor([self._filled, len(entries)]), entries, payload)
        self._tensors, self._filled = [], 0

    def _post(self, *messages: Tensor) -> None:
        last = self._tensors[-1][0].name if self._tensors else "the end"
        for message in messages:
            message = message.to(self.link.device)
            self._under_way.append((last, broadcast(self.link.groups[0], message), message))

    def _wait(self, left: int) -> None:
        while len(self._under_way) > left:
            last, work, _ = self._under_way.popleft()
            try:
                work.wait(timedelta(seconds=self.timeout))
            except RuntimeError as problem:
                raise WeightError(
                    f"the readers did not take the weights up to '{last}' within {self.timeout:g} s (sync.timeout), "
                    f"or one of them is gone: {problem}"
                ) from problem


def as_bytes(value: Any) -> Tensor:
    """A value, pickled, as u8[n]."""
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


# ---- a reader


def take(
    module: Any,
    store: Any,
    link: str,
    senders: list[str],
    version: int,
    expected: frozenset[str] | None,
    timeout: float,
) -> None:
    """Install weights as they come. WeightError, and an unfit replica, unless all of them come whole."""
    own: Link = module.links[link]
    pairs, arrived = zip(own.groups, senders, strict=True), queue.SimpleQueue()
    streams = [Incoming(group, own.device, sender, timeout, arrived) for group, sender in pairs]
    with installing(module, version), closing(arriving(streams, arrived)) as weights:
        module.load_weights(weights, version=version, adopt=False)
        check_names([Sent(stream.sizes) for stream in streams], expected)


def arriving(streams: list[Incoming], arrived: queue.SimpleQueue[Incoming]) -> Iterator[tuple[str, Tensor]]:
    """The weights of all senders, each verified. Closed early, it lets the senders end.

    Buckets are taken as they come, not in turn: senders make weights whole together, so one of them may have nothing to
    send until another one's buckets are taken.
    """
    live = list(streams)
    try:
        while live:
            stream = arrived.get()
            if (bucket := stream.next()) is None:
                live.remove(stream)
            else:
                yield from verified(*bucket)
    finally:
        for stream in live:
            stream.drain()


def verified(entries: list[tuple[TensorEntry, int]], payload: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a bucket, views of it. WeightError for one that arrived damaged."""
    sent = dict(entries)
    for entry, found in checked((entry, entry.bytes(payload)) for entry in sent):
        if found != sent[entry]:
            raise damaged(entry.name, found, sent[entry])
        yield entry.name, entry.tensor(payload)


class Incoming:
    """The buckets of one sender: a thread receives the next one while the last one is installed, and says in
    ``arrived`` that there is one."""

    def __init__(
        self, group: Any, device: torch.device, sender: str, timeout: float, arrived: queue.SimpleQueue[Incoming]
    ) -> None:
        self.group, self.device, self.sender, self.timeout = group, device, sender, timeout
        self.arrived = arrived
        self.sizes: dict[str, int] = {}
        self._last, self._ended = "", False
        self._buckets: queue.Queue[Any] = queue.Queue(1)
        threading.Thread(target=self._receive, name=f"weights from {sender}", daemon=True).start()

    def next(self) -> tuple[list[tuple[TensorEntry, int]], Tensor] | None:
        """The next bucket; None at the end. WeightError if the sender broke off or kept silent."""
        bucket = self._get()
        after = f"after '{self._last}'" if self._last else "before its first tensor"
        if isinstance(bucket, RuntimeError):
            raise WeightError(
                f"{self.sender} sent nothing for {self.timeout:g} s (sync.timeout) {after}, or is gone: {bucket}"
            ) from bucket
        if isinstance(bucket, str):
            if bucket:
                raise WeightError(f"{self.sender} broke off {after}: {bucket}")
            return None
        for entry, _ in bucket[0]:
            if entry.name in self.sizes:
                raise WeightError(f"weight '{entry.name}' was sent twice by {self.sender}")
            self.sizes[entry.name] = entry.size
            self._last = entry.name
        return bucket

    def drain(self) -> None:
        """Take what still comes, so that the sender can end."""
        while not self._ended:
            self._get()

    def _get(self) -> Any:
        bucket = self._buckets.get()
        self._ended = isinstance(bucket, RuntimeError | str)
        return bucket

    def _receive(self) -> None:
        try:
            while True:
                first, second = self._wait(2, torch.int64).tolist()
                note = pickle.loads(self._wait(second).cpu().numpy().tobytes())
                self._put(note if first == END else (note, self._wait(first)))
                if first == END:
                    return
        except RuntimeError as problem:
            self._put(problem)

    def _put(self, bucket: Any) -> None:
        self._buckets.put(bucket)
        self.arrived.put(self)

    def _wait(self, size: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        # New memory each time: whoever is handed the tensors may still hold those of the bucket before.
        message = torch.empty(size, dtype=dtype, device=self.device)
        broadcast(self.group, message).wait(timedelta(seconds=self.timeout))
        return message
