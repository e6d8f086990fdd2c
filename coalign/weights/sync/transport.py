"""What a transport of weights is, what it may ask of a model, and what all of them check.

Two phases: every rank of every target verifies what has arrived, then all install it. So whatever goes wrong on the way
leaves every replica serving the version it had. One that fails while it installs refuses to serve (``installing``).

Where the ranks of a model are, as far as it decides how weights reach them.
"""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Any, Protocol

import torch
from torch import Tensor

from coalign.config.schema import SyncConfig

Identity = tuple[str, int]  # host, process


@dataclass(frozen=True, slots=True)
class WeightEndpoint:
    """One rank. ``host`` is equal for processes that can see each other (in /proc). ``sends``: whether it yields
    weights; ``adopts``: whether it computes with the tensors that it is given. ``gpu``: which one its device is.
    ``dtype``: of all its weights, to which it casts what it is given; None: not one."""

    host: str
    process: int
    device: str
    gpu: str | None
    sends: bool
    adopts: bool
    dtype: torch.dtype | None = None

    @property
    def identity(self) -> Identity:
        return self.host, self.process


def place(module: Any, store: Any) -> WeightEndpoint:
    """Of this worker."""
    device = module.context.device
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.startswith("cuda") else None
    return WeightEndpoint(*identity(), device, gpu, module.exports, module.adopts, module.weights_dtype)


def identity() -> Identity:
    """Of this process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}/{os.geteuid()}", os.getpid()


def own_address() -> str:
    """The address of the interface with the default route; without a network that of the loopback. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 1))
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


Weights = Iterable[tuple[str, Tensor]]


class WeightError(RuntimeError):
    """Weights that did not arrive as they were sent; names the tensor."""


class ResultFuture(Protocol):
    def result(self) -> Any: ...


class SyncedModel(Protocol):
    """What a transport needs of a coalign.cluster.DistModel."""

    name: str
    store: Any
    syncing: Lock  # held by the one sync under way

    def run(
        self, function: Callable[..., Any], *arguments: Any, fatal: bool = True, beside: Sequence[Any] = ()
    ) -> ResultFuture:
        """``function(module, store, *arguments)`` on every rank: a future of the list of results. It also works on the
        weights of the models ``beside`` it."""

    def takes_turns_with(self, other: Any) -> bool:
        """Whether a call of one of the two models may have to wait until a call of the other one has ended."""


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """What a sender is to yield. ``changing``: only what training changes. ``dtype``: to it floating-point weights of a
    wider one are cast. ``timeout``: seconds that the next weight may take."""

    changing: bool
    dtype: torch.dtype | None
    timeout: float


@dataclass(frozen=True, slots=True)
class Sent:
    """What one rank sent: the bytes of each tensor, and whatever the transport needs to find them."""

    sizes: dict[str, int]
    where: Any = None


class Transport(ABC):
    """Moves the weights of one model to all replicas of another. ``dtype``: what all replicas compute with, if it is
    one; what is wider is cast before it travels."""

    dtype: torch.dtype | None = None

    def __init__(self, source: SyncedModel, target: SyncedModel, config: SyncConfig) -> None:
        self.source = source
        self.target = target
        self.config = config
        self.in_turns = source.store.in_process or source.takes_turns_with(target)

    def wanted(self, changing: bool) -> ExportRequest:
        return ExportRequest(changing, self.dtype, self.config.timeout)

    @abstractmethod
    def move(self, version: int, changing: bool, expected: frozenset[str] | None) -> list[Sent]:
        """Returns what each rank sent, when every replica serves ``version``.

        ``changing``: only the weights that training changes; the target has the others. ``expected``: the names that
        have to arrive, if known. Raises WorkerError, or WeightError for a name that came twice or not at all.
        """


class Staged(Transport):
    """A transport that keeps everything that has arrived beside the weights in use, until all of it is verified."""

    def move(self, version: int, changing: bool, expected: frozenset[str] | None) -> list[Sent]:
        sent = self.stage(version, changing)
        check_names(sent, expected)
        self.install(version, sent)
        return sent

    @abstractmethod
    def stage(self, version: int, changing: bool) -> list[Sent]:
        """Returns when every target rank can reach the weights and has found them whole; all still serve the old."""

    @abstractmethod
    def install(self, version: int, sent: list[Sent]) -> None:
        """Every target serves what is staged."""


def check_names(sent: Sequence[Sent], expected: frozenset[str] | None) -> None:
    """Raises WeightError for a name that two ranks sent, or that is missing or new among those ``expected``."""
    owner: dict[str, int] = {}
    for rank, part in enumerate(sent):
        for name in part.sizes:
            if name in owner:
                raise WeightError(f"weight '{name}' was sent twice: by rank {owner[name]} and by rank {rank}")
            owner[name] = rank
    if expected is None:
        return
    for names, what in ((expected - owner.keys(), "was not sent"), (owner.keys() - expected, "was not expected")):
        if names:
            others = f" (nor {len(names) - 1} others)" if len(names) > 1 else ""
            raise WeightError(f"weight '{min(names)}' {what}{others}")


def damaged(name: str, found: int, sent: int) -> WeightError:
    """What to raise for a tensor whose checksum differs."""
    return WeightError(f"weight '{name}' arrived damaged: checksum {found:016x}, sent with {sent:016x}")


def both(first: ResultFuture, second: ResultFuture) -> Any:
    """The first one's result once both are done; if both fail, the first one's error."""
    try:
        result = first.result()
    except BaseException:
        with suppress(Exception):
            second.result()
        raise
    second.result()
    return result


def once(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """The weights as they come. Raises WeightError for a name that comes again."""
    seen: set[str] = set()
    for name, tensor in weights:
        if name in seen:
            raise WeightError(f"weight '{name}' was sent twice by one rank")
        seen.add(name)
        yield name, tensor


def in_time(weights: Weights, timeout: float, sender: str) -> Iterator[tuple[str, Tensor]]:
    """The weights as they come. WeightError, once there is one that took longer than ``timeout`` seconds; one that
    never comes is up to whoever waits for this rank."""
    last, asked = "", monotonic()
    for name, tensor in weights:
        if monotonic() - asked > timeout:
            after = f"after '{last}'" if last else "before its first tensor"
            raise WeightError(f"{sender} sent nothing for {timeout:g} s (sync.timeout) {after}; then came '{name}'")
        yield name, tensor
        last, asked = name, monotonic()


@contextmanager
def exported(module: Any, wanted: ExportRequest) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """The weights of this rank. Whatever fails in the context, the rank takes part in the others' collectives to the
    end: else they would wait for it."""
    weights = module.export_weights(changing=wanted.changing)
    sender = f"{module.context.model}, rank {module.context.rank}"
    try:
        yield ((name, _cast(tensor, wanted.dtype)) for name, tensor in once(in_time(weights, wanted.timeout, sender)))
    finally:
        for _ in weights:
            pass


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    narrower = dtype is not None and tensor.is_floating_point() and tensor.dtype.itemsize > dtype.itemsize
    return tensor.to(dtype) if narrower else tensor


@contextmanager
def installing(module: Any, version: int) -> Iterator[None]:
    """Until its end is reached the module refuses to serve: it would compute with weights of two versions."""
    module.unfit = f"the weights of version {version} were installed in part only; it needs a complete sync"
    yield
    module.unfit = None
