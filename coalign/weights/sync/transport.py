"""The base classes of weight transports, what they use of a model, and the checks that all of them make.

Most transports work in two phases: every target rank verifies what arrived, then all ranks install it. An error in the
first phase leaves every replica serving its old version. A replica that fails in the second refuses to serve.
"""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]: public, but not in __all__

from coalign.cluster.batch_ref import Store
from coalign.cluster.future import Future
from coalign.config.schema import SyncConfig
from coalign.devices import find_gpu_uuid

if TYPE_CHECKING:
    from coalign.backends.base import Module, TrainableModule
    from coalign.backends.engines.rollout_module import RolloutModule
    from coalign.cluster.dist import DistModel

ProcessId = tuple[str, int]  # host, process number
Weights = Iterable[tuple[str, Tensor]]  # Hugging Face names and full tensors
Names = frozenset[str] | None  # those that have to arrive, if known
OnSent = Callable[[], None]


class WeightError(RuntimeError):
    """Weights did not arrive as they were sent; the message names the tensor."""


class DamagedWeights(WeightError):
    """A weight arrived with other bytes than it was sent with; sent again, it may arrive intact."""


# ---- where ranks are


@dataclass(frozen=True, slots=True)
class WeightEndpoint:
    """One rank of a model. ``host`` is equal for processes that see each other in /proc. ``gpu``: the id of its device;
    None on a CPU. ``sends``: it exports weights. ``adopts``: it can compute with the tensors that it is given.
    ``dtype``: the one that all its weights are cast to; None if they have several."""

    host: str
    process: int
    device: str
    gpu: str | None
    sends: bool
    adopts: bool
    dtype: torch.dtype | None = None

    @property
    def identity(self) -> ProcessId:
        return self.host, self.process


def describe_endpoint(module: Module, store: Store) -> WeightEndpoint:
    host, process = identify_process()
    device, gpu = module.context.device, find_gpu_uuid(module.context.device)
    return WeightEndpoint(host, process, device, gpu, module.exports, module.adopts, module.weights_dtype)


def identify_process() -> ProcessId:
    """Return an id of this process: its host, PID namespace and user, and its number there."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}/{os.geteuid()}", os.getpid()


def find_own_address() -> str:
    """Return the address of the interface with the default route, or of the loopback without a network. Nothing is
    sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 1))
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


def open_store(host: str, port: int = 0) -> TCPStore:
    """Open the store where ranks meet, on the interface of ``host`` alone; torch's own listens on all of them. ``port``
    0: any free one."""
    listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    free_port = listener.getsockname()[1]
    return TCPStore(host, free_port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


# ---- transports


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """The weights that a source rank has to send. ``changing``: only the weights that training changes. ``dtype``:
    floating-point weights of a wider type are cast to it. ``timeout``: seconds that the next weight may take."""

    changing: bool
    dtype: torch.dtype | None
    timeout: float


@dataclass(frozen=True, slots=True)
class SentWeights:
    """The weights that one rank sent: bytes by name, and ``references`` by which the transport finds them."""

    sizes: dict[str, int]
    references: Any = None


@dataclass(eq=False)
class Transport(ABC):
    """Moves the weights of one model to all replicas of another. ``senders``, ``readers``: the endpoints of the two
    models' ranks (none within one process)."""

    source: DistModel
    target: DistModel
    config: SyncConfig
    senders: Sequence[WeightEndpoint] = ()
    readers: Sequence[WeightEndpoint] = ()

    def __post_init__(self) -> None:  # noqa: B027 (few have anything to do)
        """Raise ValueError for models that it cannot connect."""

    def close(self) -> None:  # noqa: B027 (few keep anything)
        """Free what the ranks keep between two syncs."""

    @property
    def in_turns(self) -> bool:
        """Whether the two models cannot compute at once."""
        return self.source.store.in_process or self.source.takes_turns_with(self.target)

    def request(self, changing: bool) -> ExportRequest:
        """Build the request: wider weights are cast to the replicas' dtype before they travel, if all have the same."""
        dtypes = {endpoint.dtype for endpoint in self.readers}
        return ExportRequest(changing, dtypes.pop() if len(dtypes) == 1 else None, self.config.timeout)

    @property
    def bucket_bytes(self) -> int:
        return self.config.bucket_mib * 2**20

    @abstractmethod
    def move(self, version: int, changing: bool, expected: Names, on_sent: OnSent) -> list[SentWeights]:
        """Return what each rank sent, once every replica serves ``version``.

        ``changing``: send only the weights that training changes; the target has the rest. ``expected``: the names
        that have to arrive, if known. ``on_sent()`` is called once the source may change its weights again.
        Raises WorkerError, or WeightError for a name that came twice or not at all.
        """


class StagedTransport(Transport):
    """A transport that keeps all new weights beside those in use until every one of them is verified."""

    def move(self, version: int, changing: bool, expected: Names, on_sent: OnSent) -> list[SentWeights]:
        sent = self.stage(version, changing, on_sent)
        check_names(sent, expected)
        self.install(version, sent)
        return sent

    @abstractmethod
    def stage(self, version: int, changing: bool, on_sent: OnSent) -> list[SentWeights]:
        """Send the weights and call ``on_sent``; return once every target rank has verified them. All still serve their
        old version."""

    @abstractmethod
    def install(self, version: int, sent: list[SentWeights]) -> None:
        """Let every target rank serve the staged weights."""


# ---- checks


def check_names(sent: Sequence[SentWeights], expected: frozenset[str] | None) -> None:
    """Raise WeightError for a name that two ranks sent, or that ``expected`` lacks or has beyond those sent."""
    owner: dict[str, int] = {}
    for rank, weights in enumerate(sent):
        for name in weights.sizes:
            if name in owner:
                raise WeightError(f"weight '{name}' was sent twice: by rank {owner[name]} and by rank {rank}")
            owner[name] = rank
    if expected is None:
        return
    for names, what in ((expected - owner.keys(), "was not sent"), (owner.keys() - expected, "was not expected")):
        if names:
            more = f" (nor {len(names) - 1} others)" if len(names) > 1 else ""
            raise WeightError(f"weight '{min(names)}' {what}{more}")


def check_sum(name: str, computed: int, sent: int) -> None:
    """Raise DamagedWeights if a tensor's checksum is not the one that it was sent with."""
    if computed != sent:
        raise DamagedWeights(f"weight '{name}' arrived damaged: checksum {computed:016x}, sent with {sent:016x}")


def _check_unique(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights; raise WeightError for a name that comes again."""
    seen: set[str] = set()
    for name, tensor in weights:
        if name in seen:
            raise WeightError(f"weight '{name}' was sent twice by one rank")
        seen.add(name)
        yield name, tensor


def wait_for_both(first: Future, second: Future, on_first: Callable[[], None] = lambda: None) -> Any:
    """Return the first result once both calls are done, and call ``on_first`` once that one is. If both fail, raise the
    first one's error."""
    try:
        result = first.result()
    except BaseException:
        with suppress(Exception):
            second.result()
        raise
    on_first()
    second.result()
    return result


@contextmanager
def open_export(module: TrainableModule, request: ExportRequest) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """Yield an iterator over this rank's weights, cast as ``request`` says.

    It raises WeightError for a repeated name, and after a weight that took longer than the timeout. (Callers have
    deadlines of their own for one that never comes.) On exit the export is run to its end even after an error,
    because other ranks wait for this one in its collectives.
    """
    weights = module.export_weights(changing=request.changing)

    def check_and_cast() -> Iterator[tuple[str, Tensor]]:
        after, asked = "before its first tensor", monotonic()
        for name, tensor in weights:
            if monotonic() - asked > request.timeout:
                sender = f"{module.context.model}, rank {module.context.rank}"
                limit = f"{request.timeout:g} s (sync.timeout)"
                raise WeightError(f"{sender} sent nothing for {limit} {after}; then came '{name}'")
            dtype = request.dtype
            wider = dtype is not None and tensor.is_floating_point() and tensor.dtype.itemsize > dtype.itemsize
            yield name, tensor.to(dtype) if wider else tensor
            after, asked = f"after '{name}'", monotonic()

    try:
        yield _check_unique(check_and_cast())
    finally:
        for _ in weights:
            pass


def forget_link(module: Module, store: Store, link: str) -> None:
    """Drop what a transport keeps in a worker."""
    module.links.pop(link, None)


@contextmanager
def guard_installation(module: Module, version: int) -> Iterator[None]:
    """Let the module refuse to serve unless the block succeeds: its weights would be of two versions."""
    module.unfit = f"the weights of version {version} were installed in part only; it needs a complete sync"
    yield
    module.unfit = None


class LiveTensorTransport(Transport):
    """Hands over the live tensors; nothing is copied. For models that never compute at once, since training changes the
    tensors in place."""

    adopt = True

    def move(self, version: int, changing: bool, expected: Names, on_sent: OnSent) -> list[SentWeights]:
        [weights] = self.source.run(_open_live_weights, changing, fatal=False).result()
        sent = self.target.run(load_weights, weights, version, self.adopt, fatal=False, beside=[self.source]).result()
        check_names(sent, expected)
        return [SentWeights(dict.fromkeys(rank.sizes, 0)) for rank in sent] if self.adopt else sent


class TensorCopyTransport(LiveTensorTransport):
    """Copies the tensors, so that the target keeps this version while the source trains on."""

    adopt = False


def _open_live_weights(module: TrainableModule, store: Store, changing: bool) -> Weights:
    """Return the module's own tensors; a weight that is merged from several is made when the target takes it."""
    return _check_unique(module.export_weights(changing=changing))


def load_weights(module: RolloutModule, store: Store, weights: Weights, version: int, adopt: bool) -> SentWeights:
    """Let the module serve these tensors, or their present values; return their sizes."""
    sizes: dict[str, int] = {}

    def note_sizes() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            sizes[name] = tensor.nbytes
            yield name, tensor

    with guard_installation(module, version):
        module.load_weights(note_sizes(), version=version, adopt=adopt)
    return SentWeights(sizes)
