"""Weight sync between two models, by the transport that fits the placement of their ranks."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from coalign.cluster.choice import choose_cluster, plan_slots
from coalign.cluster.future import WorkerError
from coalign.config.schema import RunConfig, SyncConfig
from coalign.roles import Rollout
from coalign.threads import begin_in_thread
from coalign.types import Stats, Total
from coalign.weights.sync import transport
from coalign.weights.sync.transport import DamagedWeights, Transport, WeightEndpoint, WeightError

if TYPE_CHECKING:
    from coalign.cluster.dist import DistModel
    from coalign.launch.plan import PlannedModel

log = logging.getLogger(__name__)
MAX_DAMAGED = 2  # after so many damaged transfers memory or a program is the cause
_TRANSPORTS = {  # imported when one is chosen
    "broadcast": "coalign.weights.sync.broadcast:BroadcastTransport",
    "cuda_ipc": "coalign.weights.sync.shared_memory:CudaIpcTransport",
    "disk": "coalign.weights.sync.stored:DiskTransport",
    "object_store": "coalign.weights.sync.stored:ObjectStoreTransport",
    "shared_memory": "coalign.weights.sync.shared_memory:SharedMemoryTransport",
}


class WeightSync:
    """Gives the weights of ``source`` to ``target``, with a version that the target reports for every token it samples.
    ``overlap``: the target computes while the source trains, so it needs a copy of its own."""

    def __init__(
        self, source: DistModel, target: DistModel, config: SyncConfig | None = None, *, overlap: bool = False
    ) -> None:
        self.source = source
        self.target = target
        self.config = config or SyncConfig()
        self.overlap = overlap
        self.transport: Transport | None = None
        target.takes_weights = True
        self._names: dict[bool, frozenset[str]] = {}  # names of the weights that arrived, by `changing`
        self._under_way: concurrent.futures.Future[int] | None = None  # bytes of the newest sync, once all serve it

    @property
    def complete(self) -> bool:
        """Whether the target has all weights: from then on frozen ones need not move."""
        return False in self._names

    def __call__(self, version: int) -> Stats:
        """Move the weights; return once every replica serves them. It waits for another sync of either model.

        With ``overlap`` it returns as soon as the source has sent them, and replicas take them meanwhile; `finish`
        waits for these. The statistics are `sync/bytes` (moved to each target by the newest sync that has ended) and
        `sync/seconds` (of waiting). Raises WorkerError or WeightError naming the tensor that arrives damaged, twice or
        not at all, with ``overlap`` perhaps at the next call. Then the target serves its old version or, if it had
        begun to install the new one, nothing.
        """
        start = time.perf_counter()
        moved = self.finish()
        if self.target.slices is not None:
            self.target.slices.begin_sync()
        if self.overlap:
            sent = threading.Event()
            self._under_way = begin_in_thread(partial(self._send, version, sent.set), "coalign-sync")
            self._under_way.add_done_callback(lambda _: sent.set())
            sent.wait()
            moved = self.finish() if self._under_way.done() else moved
        else:
            moved = self._send(version, lambda: None)
        return {"sync/bytes": Total(moved), "sync/seconds": Total(time.perf_counter() - start)}

    def finish(self) -> int:
        """Wait until every replica serves the newest weights; return their bytes. Raises what that sync raises."""
        under_way, self._under_way = self._under_way, None
        return under_way.result() if under_way else 0

    def reconnect(self) -> None:
        """Forget a failed sync and the readers: processes of either model are new."""
        with suppress(Exception):
            self.finish()
        self._forget_readers()

    def _send(self, version: int, on_sent: Callable[[], None]) -> int:
        """Move the weights until every replica serves them; return the bytes."""
        with self._lock_models(version):
            moved = self._move(version, on_sent)
        if self.target.slices is not None:
            self.target.slices.end_sync()
        return moved

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

    def _move(self, version: int, on_sent: Callable[[], None]) -> int:
        """Move the weights; return the bytes. Lost replicas are replaced, and then all weights go to all replicas.
        Weights that arrive damaged are sent again, up to MAX_DAMAGED times."""
        slices, damaged = self.target.slices, 0
        while True:
            start = time.monotonic()
            try:
                if slices is not None and slices.joining:
                    self._forget_readers()
                return self._move_once(version, on_sent)
            except WorkerError as error:
                if slices is not None and slices.recover(error, start):
                    continue
                damaged += 1
                if not isinstance(error.cause, DamagedWeights) or damaged > MAX_DAMAGED:
                    raise
                log.warning("weights of version %d: %s; all are sent again", version, error.cause)
                self._names = {}

    def _forget_readers(self) -> None:
        """Connect to the current replicas at the next move, and send them all weights."""
        if self.transport is not None:
            self.transport.close()
        self.transport, self._names = None, {}

    def _move_once(self, version: int, on_sent: Callable[[], None]) -> int:
        if self.transport is None:
            self.transport = _choose_transport(self.source, self.target, self.config, self.overlap)
        changing = self.complete
        try:
            sent = self.transport.move(version, changing, self._names.get(changing), on_sent)
        except WorkerError as problem:
            from coalign.weights.sync.segment import HostMemoryFull

            if self.config.transport != "auto" or not isinstance(problem.cause, HostMemoryFull | OSError):
                raise
            log.warning("weights of %s: %s; they go through the object store instead", self.source.name, problem.cause)
            failed, store = self.transport, resolve_name(_TRANSPORTS["object_store"])
            instead: Transport = store(self.source, self.target, self.config, failed.senders, failed.readers)
            self.transport = instead
            sent = instead.move(version, changing, self._names.get(changing), on_sent)
        self._names[changing] = frozenset(name for rank in sent for name in rank.sizes)
        return sum(size for rank in sent for size in rank.sizes.values())


def _choose_transport(source: DistModel, target: DistModel, config: SyncConfig, overlap: bool) -> Transport:
    """Return the transport that ``config`` names or, for `auto`, the one that fits the placement of the ranks."""
    if config.transport == "auto" and source.store.in_process and target.store.in_process:
        return (transport.TensorCopyTransport if overlap else transport.LiveTensorTransport)(source, target, config)
    senders, readers = (model.run(transport.describe_endpoint).result() for model in (source, target))
    name = config.transport
    if name == "auto":
        name = _choose_transport_name([*senders, *readers], source.takes_turns_with(target))
    return resolve_name(_TRANSPORTS[name])(source, target, config, senders, readers)


def _choose_transport_name(endpoints: Sequence[WeightEndpoint], in_turns: bool) -> str:
    """Return the transport for ranks at these endpoints. ``in_turns``: their models take turns on their devices."""
    hosts, gpus = ({getattr(endpoint, what) for endpoint in endpoints} for what in ("host", "gpu"))
    if len(hosts) > 1:
        return "object_store" if in_turns else "broadcast"
    if in_turns:  # on the GPU the weights under way would take memory from the model whose turn it is
        return "shared_memory"
    return "cuda_ipc" if len(gpus) == 1 and None not in gpus else "shared_memory"


def check_syncs(syncs: Sequence[tuple[str, str]], models: Mapping[str, PlannedModel], config: RunConfig) -> None:
    """Refuse (ValueError) what cannot travel between the models of a run, and settings for syncs that it has not."""
    if config.rollout.routing_replay and not syncs:
        raise ValueError(f"rollout.routing_replay is true, and in `{config.algorithm}` no policy samples; leave it out")
    if config.sync.adapters == "apart":
        _check_adapters(syncs, models, config)
    _check_repetition_penalty(syncs, models)
    if config.sync.transport in ("broadcast", "cuda_ipc"):
        _check_transport(syncs, models, config)


def _check_transport(syncs: Sequence[tuple[str, str]], models: Mapping[str, PlannedModel], config: RunConfig) -> None:
    """Refuse a transport that cannot connect two models where they are placed. ValueError names both.

    The first sync refuses what depends on hosts: only a running cluster knows them.
    """
    name = config.sync.transport
    if choose_cluster(config) == "local":
        raise ValueError(
            f"sync.transport: `{name}` is for models in processes of their own, and here all of them run in this one; "
            "leave it out, or set runtime.cluster: ray"
        )
    slots = plan_slots({name: model.config for name, model in models.items()}, config.runtime.colocation)
    for source, target in syncs:
        gpus = [slots[model].footprints[model].total for model in (source, target)]
        together = slots[source] is slots[target]
        if name == "broadcast" and together:
            raise ValueError(
                f"sync.transport: `broadcast` needs models.{source} and models.{target} at once, and in one group of "
                "runtime.colocation they take turns; use shared_memory, object_store or disk"
            )
        if name == "cuda_ipc" and not (together and gpus == [1, 1]):
            raise ValueError(
                f"sync.transport: `cuda_ipc` needs models.{source} and models.{target} on one GPU; they have {gpus[0]} "
                f"and {gpus[1]}, in {'one' if together else 'no common'} group of runtime.colocation; use shared_memory"
            )


def _check_adapters(syncs: Sequence[tuple[str, str]], models: Mapping[str, PlannedModel], config: RunConfig) -> None:
    """Refuse to sync adapters separately where there are none, or where a model cannot send or receive them."""
    setting, instead = "sync.adapters is `apart`", "use `merged`, which is the default"
    if not syncs:
        raise ValueError(f"{setting}, and in `{config.algorithm}` no weights travel between models; leave it out")
    for source, target in syncs:
        lora = models[source].config.lora
        if lora is None:
            raise ValueError(f"{setting}, and models.{source} has no adapters: give it `lora`, or {instead}")
        if lora.dora:
            raise ValueError(f"{setting}, and the magnitudes of models.{source}.lora.dora have to be merged; {instead}")
        for model in (models[source], models[target]):
            if not model.module.adapters:
                named = f"models.{model.name}.module, `{model.config.module}`"
                raise ValueError(f"{setting}, and {named}, knows merged weights only; {instead}")


def _check_repetition_penalty(syncs: Sequence[tuple[str, str]], models: Mapping[str, PlannedModel]) -> None:
    """Refuse to train a policy on samples of a penalised distribution, whose log-probs no trainer computes."""
    for source, target in syncs:
        penalty = models[target].config.sampling.repetition_penalty
        if models[target].role is Rollout and penalty != 1:
            raise ValueError(
                f"models.{target}.sampling.repetition_penalty is {penalty:g}: it samples from another distribution "
                f"than that of the log-probs from which models.{source} learns; set it to 1 (for evaluation there is "
                "runtime.eval_sampling.repetition_penalty)"
            )
