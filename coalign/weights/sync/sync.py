"""Weight sync between two models, by the transport that fits where their ranks are."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from coalign.cluster.future import WorkerError
from coalign.config.schema import SyncConfig
from coalign.types import Stats, Total
from coalign.weights.sync.broadcast import BroadcastTransport
from coalign.weights.sync.segment import HostMemoryFull
from coalign.weights.sync.shared_memory import CudaIpcTransport, SharedMemoryTransport
from coalign.weights.sync.stored import DiskTransport, ObjectStoreTransport
from coalign.weights.sync.transport import (
    LiveTensorTransport,
    TensorCopyTransport,
    Transport,
    WeightEndpoint,
    WeightError,
    describe_endpoint,
)

if TYPE_CHECKING:
    from coalign.cluster.dist import DistModel

log = logging.getLogger(__name__)
TRANSPORTS = {
    "broadcast": BroadcastTransport,
    "cuda_ipc": CudaIpcTransport,
    "disk": DiskTransport,
    "object_store": ObjectStoreTransport,
    "shared_memory": SharedMemoryTransport,
}


class WeightSync:
    """Gives the weights of ``source`` to ``target``, with a version that the target reports for every token it samples.

    ``overlap``: the target computes while the source trains, so it needs a copy of its own.
    """

    def __init__(
        self, source: DistModel, target: DistModel, config: SyncConfig | None = None, *, overlap: bool = False
    ) -> None:
        self.source = source
        self.target = target
        self.config = config or SyncConfig()
        self.overlap = overlap
        self.transport: Transport | None = None
        self._names: dict[bool, frozenset[str]] = {}  # that arrived, by `changing`

    @property
    def complete(self) -> bool:
        """Whether the target has all weights: from then on frozen ones need not move."""
        return False in self._names

    def __call__(self, version: int) -> Stats:
        """Move the weights; return once every replica serves them. It waits for another sync of either model.

        The statistics are `sync/bytes` (moved to each target) and `sync/seconds`. Raises WorkerError or WeightError
        naming the tensor that arrived damaged, twice or not at all. Then the target serves its old version or, if it
        had begun to install the new one, nothing.
        """
        with self._lock_models(version):
            start = time.perf_counter()
            moved = self._move(version)
            return {"sync/bytes": Total(moved), "sync/seconds": Total(time.perf_counter() - start)}

    @contextmanager
    def _lock_models(self, version: int) -> Iterator[None]:
        with ExitStack() as stack:
            for model in sorted((self.source, self.target), key=lambda model: model.name):
                if not model.syncing.acquire(timeout=self.config.timeout):
                    raise WeightError(
                        f"weights of version {version} for {self.target.name}: another sync of {model.name} has been "
                        f"under way for {self.config.timeout:g} s (sync.timeout)"
                    )
                stack.callback(model.syncing.release)
            yield

    def _move(self, version: int) -> int:
        """Return the bytes that were moved."""
        if self.transport is None:
            self.transport = choose_transport(self.source, self.target, self.config, self.overlap)
        changing = self.complete
        try:
            sent = self.transport.move(version, changing, self._names.get(changing))
        except WorkerError as problem:
            if self.config.transport != "auto" or not isinstance(problem.cause, HostMemoryFull | OSError):
                raise
            log.warning("weights of %s: %s; they go through the object store instead", self.source.name, problem.cause)
            before = self.transport
            self.transport = ObjectStoreTransport(self.source, self.target, self.config, before.senders, before.readers)
            sent = self.transport.move(version, changing, self._names.get(changing))
        self._names[changing] = frozenset(name for part in sent for name in part.sizes)
        return sum(size for part in sent for size in part.sizes.values())


def choose_transport(source: DistModel, target: DistModel, config: SyncConfig, overlap: bool) -> Transport:
    """Return the transport that ``config`` names or, for `auto`, the one that fits where the ranks are."""
    if config.transport == "auto" and source.store.in_process and target.store.in_process:
        return (TensorCopyTransport if overlap else LiveTensorTransport)(source, target, config)
    senders, readers = (model.run(describe_endpoint).result() for model in (source, target))
    name = config.transport
    if name == "auto":
        name = choose_transport_name([*senders, *readers], source.takes_turns_with(target))
    return TRANSPORTS[name](source, target, config, senders, readers)


def choose_transport_name(endpoints: Sequence[WeightEndpoint], in_turns: bool) -> str:
    """Return the transport for ranks at these places. ``in_turns``: their models take turns on their devices."""
    hosts, gpus = ({getattr(endpoint, what) for endpoint in endpoints} for what in ("host", "gpu"))
    if len(hosts) > 1:
        return "object_store" if in_turns else "broadcast"
    if in_turns:  # on the GPU the weights under way would take memory from the model whose turn it is
        return "shared_memory"
    return "cuda_ipc" if len(gpus) == 1 and None not in gpus else "shared_memory"
