"""After a training step: give the source's weights to the models that compute with them.

This file picks a transport by where the models live; each transport has a file of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from coalign.cluster.future import WorkerError
from coalign.config.schema import SyncConfig
from coalign.types import Stats, Total
from coalign.weights.sync.broadcast import Broadcast
from coalign.weights.sync.cuda_ipc import CudaIpc
from coalign.weights.sync.disk import Disk
from coalign.weights.sync.in_process import Adopt, Copy
from coalign.weights.sync.object_store import ObjectStore
from coalign.weights.sync.segment import NoRoom
from coalign.weights.sync.shared_memory import SharedMemory
from coalign.weights.sync.transport import SyncedModel, Transport, WeightEndpoint, WeightError, place

log = logging.getLogger(__name__)


class WeightSync:
    """Weights of ``source`` to ``target``, with a version that the target reports for every token it samples.

    ``overlap``: the target computes while the source trains, so it needs weights that stand still.
    """

    def __init__(
        self, source: SyncedModel, target: SyncedModel, config: SyncConfig | None = None, *, overlap: bool = False
    ) -> None:
        self.source = source
        self.target = target
        self.config = config or SyncConfig()
        self.overlap = overlap
        self.transport: Transport | None = None
        self._names: dict[bool, frozenset[str]] = {}  # that arrived: of all weights, of those that training changes

    @property
    def complete(self) -> bool:
        """The target has all weights: from then on frozen ones need not move."""
        return False in self._names

    def __call__(self, version: int) -> Stats:
        """Move the weights and wait until every replica serves them. Another sync of either model is waited for.

        `sync/bytes` (moved to each target) and `sync/seconds`. Raises WorkerError or WeightError naming the tensor that
        arrived damaged, twice or not at all; the target then serves its old version, or, if it had begun to take the
        new weights, nothing.
        """
        with self._turn(version):
            begun = time.perf_counter()
            moved = self._move(version)
            return {"sync/bytes": Total(moved), "sync/seconds": Total(time.perf_counter() - begun)}

    @contextmanager
    def _turn(self, version: int) -> Iterator[None]:
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
        if self.transport is None:
            self.transport = transport_between(self.source, self.target, self.config, self.overlap)
        changing = self.complete
        try:
            sent = self.transport.move(version, changing, self._names.get(changing))
        except WorkerError as problem:
            if self.config.transport != "auto" or not isinstance(problem.cause, NoRoom | OSError):
                raise
            log.warning("weights of %s: %s; they go through the object store instead", self.source.name, problem.cause)
            dtype = self.transport.dtype
            self.transport = ObjectStore(self.source, self.target, self.config)
            self.transport.dtype = dtype
            sent = self.transport.move(version, changing, self._names.get(changing))
        self._names[changing] = frozenset(name for part in sent for name in part.sizes)
        return sum(size for part in sent for size in part.sizes.values())


def transport_between(source: SyncedModel, target: SyncedModel, config: SyncConfig, overlap: bool) -> Transport:
    """The one that ``config`` names, or the one that fits where the ranks are."""
    if config.transport == "auto" and source.store.in_process and target.store.in_process:
        return (Copy if overlap else Adopt)(source, target, config)
    senders, readers = (model.run(place).result() for model in (source, target))
    transport = _named(source, target, config, senders, readers)
    dtypes = {place.dtype for place in readers}
    transport.dtype = dtypes.pop() if len(dtypes) == 1 else None
    return transport


def _named(
    source: SyncedModel,
    target: SyncedModel,
    config: SyncConfig,
    senders: Sequence[WeightEndpoint],
    readers: Sequence[WeightEndpoint],
) -> Transport:
    name = config.transport
    if name == "auto":
        name = fitting([*senders, *readers], source.takes_turns_with(target))
    match name:
        case "object_store":
            return ObjectStore(source, target, config)
        case "disk":
            return Disk(source, target, config)
        case "broadcast":
            return Broadcast(source, target, config, senders, readers)
        case "cuda_ipc":
            return CudaIpc(source, target, config, senders, readers)
        case "shared_memory":
            return SharedMemory(source, target, config, senders, readers)


def fitting(places: Sequence[WeightEndpoint], in_turns: bool) -> str:
    """The transport for ranks at these places, whose models take turns on their devices or do not."""
    hosts, gpus = ({getattr(place, what) for place in places} for what in ("host", "gpu"))
    if len(hosts) > 1:
        return "object_store" if in_turns else "broadcast"
    if in_turns:  # on the GPU the weights under way would lie beside whoever's turn it is
        return "shared_memory"
    return "cuda_ipc" if len(gpus) == 1 and None not in gpus else "shared_memory"
