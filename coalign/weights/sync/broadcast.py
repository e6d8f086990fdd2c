"""Transport between hosts: each sender broadcasts buckets to all readers, in a torch.distributed group of its own.

All senders send at once, and each has two buckets under way: the next one is filled while the last one travels, and
readers verify and install the last one while the next one comes. Readers install each tensor once it is verified. So a
stream that breaks off leaves replicas that refuse to serve until the next complete sync.

A bucket is three messages: a header i64[2] (bytes of tensors, bytes of entries), the entries as JSON, the tensors.
The header (END, n) ends the stream. It is followed by n bytes: a text as JSON, empty or the error that ended it.

The groups are made without torch.distributed's registry, which knows one world: that of the models.
"""

from __future__ import annotations

import json
import queue
import threading
import uuid
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]: public, but not in __all__
from torch.distributed.distributed_c10d import BroadcastOptions, ProcessGroup, Work

from coalign.cluster.batch_ref import Store
from coalign.devices import make_nccl_group
from coalign.weights.sync import transport
from coalign.weights.sync.checksums import checksum_tensors, copy_tensors
from coalign.weights.sync.segment import TensorEntry, align, pack
from coalign.weights.sync.transport import SentWeights, Transport, WeightError

if TYPE_CHECKING:
    from coalign.backends.base import Module, TrainableModule
    from coalign.backends.engines.rollout_module import RolloutModule
    from coalign.weights.sync.transport import ExportRequest, ProcessId

END = -1
RendezvousAddress = tuple[str, int] | None  # host, port; None for a rank that does not send
Entries = list[tuple[TensorEntry, int]]  # the tensors of a bucket, each with its checksum


class BroadcastTransport(Transport):
    """Broadcasts to the readers in groups of torch.distributed. ValueError for models that take turns on devices."""

    def __post_init__(self) -> None:
        if self.in_turns:
            raise ValueError(
                f"sync.transport: `broadcast` needs {self.source.name} and {self.target.name} at once, and they take "
                "turns on their devices; use shared_memory, object_store or disk"
            )
        self.labels = [f"{self.source.name}, rank {rank}" for rank, sender in enumerate(self.senders) if sender.sends]
        on_gpus = all(endpoint.device.startswith("cuda") for endpoint in [*self.senders, *self.readers])
        self.device_type = "cuda" if on_gpus else "cpu"
        self.link: str | None = None

    def move(
        self, version: int, changing: bool, expected: transport.Names, on_sent: transport.OnSent
    ) -> list[SentWeights]:
        if self.link is None:
            self.link = self._connect(f"broadcast {uuid.uuid4().hex}")
        sending = self.source.run(send, self.link, self.request(changing), self.bucket_bytes, fatal=False)
        arguments = self.labels, version, expected, self.config.timeout
        receiving = self.target.run(_receive_and_install, self.link, *arguments, fatal=False)
        try:
            transport.wait_for_both(receiving, sending)  # a reader's error includes its sender's
            return sending.result()
        except BaseException:
            for leaving in [model.run(_leave_groups, self.link, fatal=False) for model in (self.source, self.target)]:
                with suppress(Exception):  # the rank may have died
                    leaving.result()
            self.link = None
            raise

    def _connect(self, link: str) -> str:
        addresses = self.source.run(_open_rendezvous, link, self.device_type, fatal=False).result()
        senders = self.source.run(_join_own_group, link, len(self.readers), self.config.timeout, fatal=False)
        readers = [endpoint.identity for endpoint in self.readers]
        arguments = link, self.device_type, addresses, readers, self.config.timeout
        transport.wait_for_both(senders, self.target.run(_join_sender_groups, *arguments, fatal=False))
        return link


# ---- groups


@dataclass
class _BroadcastLink:
    """A rank's groups: the one that it sends in, or those that it reads from, with ``device`` memory."""

    device: torch.device
    groups: list[ProcessGroup] = field(default_factory=list)
    server: TCPStore | None = None
    buffers: deque[Tensor] = field(default_factory=deque)

    def next_buffer(self, size: int) -> Tensor:
        """Return u8[size], one of two in turn: the other one is under way. Both are kept, since new memory costs as
        much time as a copy."""
        oldest = self.buffers.popleft() if len(self.buffers) == 2 else None
        if oldest is None or len(oldest) < size:
            oldest = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.buffers.append(oldest)
        return oldest[:size]

    def join_group(self, server: TCPStore, rank: int, size: int, timeout: float) -> None:
        limit = timedelta(seconds=timeout)
        if self.device.type == "cpu":
            group = dist.ProcessGroupGloo(server, rank, size, limit)
        else:
            group = make_nccl_group(server, rank, size, limit, self.device)
        self.groups.append(cast("ProcessGroup", group))  # torch's stubs give only that class its `broadcast`


def _open_link(module: Module, link: str, device_type: str) -> _BroadcastLink:
    """``device_type``: `cuda` if all ranks have GPUs, else `cpu`."""
    device = module.context.device if device_type == "cuda" else device_type
    module.links[link] = _BroadcastLink(torch.device(device))
    return module.links[link]


def _open_rendezvous(module: Module, store: Store, link: str, device_type: str) -> RendezvousAddress:
    """Return where readers meet this rank, if it sends."""
    rank_link = _open_link(module, link, device_type)
    if not module.exports:
        return None
    rank_link.server = transport.open_store(host := transport.find_own_address())
    return host, rank_link.server.port


def _join_own_group(module: Module, store: Store, link: str, readers: int, timeout: float) -> None:
    """Join a sender's group as rank 0. Raises RuntimeError if not all readers come within ``timeout`` s."""
    rank_link: _BroadcastLink = module.links[link]
    if rank_link.server is not None:
        rank_link.join_group(rank_link.server, 0, 1 + readers, timeout)


def _join_sender_groups(
    module: Module,
    store: Store,
    link: str,
    device_type: str,
    addresses: list[RendezvousAddress],
    readers: Sequence[ProcessId],
    timeout: float,
) -> None:
    """Join the group of every sender. Raises RuntimeError if not all ranks come within ``timeout`` s."""
    rank_link, rank = _open_link(module, link, device_type), 1 + readers.index(transport.identify_process())
    for host, port in filter(None, addresses):
        server = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))
        rank_link.join_group(server, rank, 1 + len(readers), timeout)


def _leave_groups(module: Module, store: Store, link: str) -> None:
    """End the groups: after a failure their ranks would not agree on what comes next."""
    for group in module.links.pop(link, _BroadcastLink(torch.device("cpu"))).groups:
        group.shutdown()


def broadcast(group: ProcessGroup, tensor: Tensor) -> Work:
    """Start to send (as rank 0) or to receive ``tensor``; return what to ``wait`` for."""
    return group.broadcast([tensor], BroadcastOptions())


# ---- a sender


def send(module: TrainableModule, store: Store, link: str, request: ExportRequest, size: int) -> SentWeights:
    """Broadcast this rank's weights in buckets of up to ``size`` bytes."""
    rank_link: _BroadcastLink = module.links[link]
    sizes: dict[str, int] = {}
    with transport.open_export(module, request) as weights:
        if not rank_link.groups:
            if (item := next(weights, None)) is not None:
                raise WeightError(f"rank {module.context.rank} yields '{item[0]}', but its `exports` is False")
            return SentWeights({})
        sender = _BroadcastSender(rank_link, request.timeout)
        try:
            for bucket in pack(weights, size):
                sizes |= {entry.name: entry.size for entry, _ in bucket}
                sender.send(bucket)
            sender.end()
        except BaseException as problem:
            with suppress(WeightError):  # readers that cannot be told have a deadline of their own
                sender.end(f"{type(problem).__name__}: {problem}")
            raise
    return SentWeights(sizes)


class _BroadcastSender:
    """The buckets of a sender: one is filled while another one is under way."""

    def __init__(self, link: _BroadcastLink, timeout: float) -> None:
        self.link, self.timeout = link, timeout
        self._under_way: deque[tuple[str, Work, Tensor]] = deque()

    def end(self, problem: str = "") -> None:
        """End the stream; ``problem`` is the error that ends it too early."""
        text = _to_bytes(problem)
        self._post("the end", torch.tensor([END, len(text)]), text)
        self._wait(0)

    def send(self, bucket: list[tuple[TensorEntry, Tensor]]) -> None:
        self._wait(3)  # the messages of one bucket
        last, _ = bucket[-1]
        filled = last.offset + align(last.size)
        payload = self.link.next_buffer(filled)
        jobs = ((entry, tensor, entry.bytes(payload)) for entry, tensor in bucket)
        entries = _to_bytes(
            [
                [e.name, str(e.dtype).removeprefix("torch."), e.shape, e.offset, digest]
                for e, digest in copy_tensors(jobs)
            ]
        )
        self._post(last.name, torch.tensor([filled, len(entries)]), entries, payload)

    def _post(self, last: str, *messages: Tensor) -> None:
        for message in messages:
            message = message.to(self.link.device)
            self._under_way.append((last, broadcast(self.link.groups[0], message), message))

    def _wait(self, left: int) -> None:
        """Wait until no more than ``left`` messages are under way."""
        while len(self._under_way) > left:
            last, work, _ = self._under_way.popleft()
            try:
                work.wait(timedelta(seconds=self.timeout))
            except RuntimeError as problem:
                raise WeightError(
                    f"the readers did not take the weights up to '{last}' within {self.timeout:g} s (sync.timeout), "
                    f"or one of them is gone: {problem}"
                ) from problem


def _to_bytes(value: Any) -> Tensor:
    """Return the value as JSON, u8[n]: a reader runs nothing that came over the network."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


# ---- a reader


def _receive_and_install(
    module: RolloutModule,
    store: Store,
    link: str,
    senders: list[str],
    version: int,
    expected: frozenset[str] | None,
    timeout: float,
) -> None:
    """Install weights as they come. Unless all of them arrive, it raises WeightError and the replica is unfit."""
    rank_link: _BroadcastLink = module.links[link]
    ready: queue.SimpleQueue[_BroadcastReceiver] = queue.SimpleQueue()
    pairs = zip(rank_link.groups, senders, strict=True)
    streams = [_BroadcastReceiver(group, rank_link.device, sender, timeout, ready) for group, sender in pairs]
    with transport.guard_installation(module, version), closing(_merge_streams(streams, ready)) as weights:
        module.load_weights(weights, version=version, adopt=False)
        transport.check_names([SentWeights(stream.sizes) for stream in streams], expected)


def _merge_streams(
    streams: list[_BroadcastReceiver], ready: queue.SimpleQueue[_BroadcastReceiver]
) -> Generator[tuple[str, Tensor]]:
    """Yield the verified weights of all senders. If it is closed early, it drains the streams so that senders end.
    Buckets are taken as they come, not in turn. Senders may gather weights together, so that one of them has nothing to
    send until another one's buckets are taken."""
    live = list(streams)
    try:
        while live:
            stream = ready.get()
            if (bucket := stream.next_bucket()) is None:
                live.remove(stream)
                continue
            sums, payload = dict(bucket[0]), bucket[1]
            for entry, computed in checksum_tensors((entry, entry.bytes(payload)) for entry in sums):
                transport.check_sum(entry.name, computed, sums[entry])
                yield entry.name, entry.tensor(payload)
    finally:
        for stream in live:
            stream.drain()


class _BroadcastReceiver:
    """The buckets of one sender. A thread receives the next bucket while the last one is installed, and puts this
    object into ``ready`` for each."""

    def __init__(
        self,
        group: ProcessGroup,
        device: torch.device,
        sender: str,
        timeout: float,
        ready: queue.SimpleQueue[_BroadcastReceiver],
    ) -> None:
        self.group, self.device, self.sender, self.timeout, self.ready = group, device, sender, timeout, ready
        self.sizes: dict[str, int] = {}
        self._last, self._ended = "", False
        # A bucket, an error while receiving, or the sender's last text.
        self._buckets: queue.Queue[tuple[Entries, Tensor] | RuntimeError | str] = queue.Queue(1)
        threading.Thread(target=self._receive, name=f"weights from {sender}", daemon=True).start()

    def next_bucket(self) -> tuple[Entries, Tensor] | None:
        """Return the next bucket; None at the end. Raises WeightError if the sender broke off or sent nothing."""
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
        """Take the remaining buckets, so that the sender can end."""
        while not self._ended:
            self._get()

    def _get(self) -> tuple[Entries, Tensor] | RuntimeError | str:
        bucket = self._buckets.get()
        self._ended = isinstance(bucket, RuntimeError | str)
        return bucket

    def _receive(self) -> None:
        try:
            while True:
                first, second = self._wait(2, torch.int64).tolist()
                note = json.loads(self._wait(second).cpu().numpy().tobytes())
                if first == END:
                    return self._put(note)
                entries = [
                    (TensorEntry(name, getattr(torch, dtype), tuple(shape), offset), checksum)
                    for name, dtype, shape, offset, checksum in note
                ]
                self._put((entries, self._wait(first)))
        except RuntimeError as problem:
            self._put(problem)

    def _put(self, bucket: tuple[Entries, Tensor] | RuntimeError | str) -> None:
        self._buckets.put(bucket)
        self.ready.put(self)

    def _wait(self, size: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        # New memory each time: the module may still hold tensors of the previous bucket.
        message = torch.empty(size, dtype=dtype, device=self.device)
        broadcast(self.group, message).wait(timedelta(seconds=self.timeout))
        return message
