"""The cluster of a run that torchrun started: rank 0 drives, the other processes serve its calls. No Ray.

Every process holds one rank of the model that is trained by several, and a replica of each frozen model that has as
many. The driver keeps all batches, and sends each process its rows with a call. Processes of one machine meet at a
Unix socket in a directory of the user's own; those of several at a port of the driver, which asks for a secret (TOKEN).
"""

from __future__ import annotations

import concurrent.futures
import os
import pickle
import signal
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, cast

import numpy as np

from coalign.cluster.batch_ref import WorkerRows
from coalign.cluster.dist import DistActor
from coalign.cluster.future import WorkerHandle, WorkerTask
from coalign.cluster.local import LocalCluster, LocalReference, LocalStore, LocalWorker
from coalign.cluster.placement.nodes import Node, ProcessPlacement, find_accelerator
from coalign.cluster.placement.slots import Slot
from coalign.cluster.worker import Worker
from coalign.config.schema import ModelConfig, RunConfig
from coalign.threads import CallQueue, begin_in_thread, start_thread

TOKEN = "COALIGN_JOB_TOKEN"  # a secret that all processes of several machines have in their environment
JOIN_SECONDS = 300.0  # how long the driver waits for the other processes: each imports torch first
LOOK_SECONDS = 0.1  # between two attempts of a process to reach the driver


@dataclass(frozen=True)
class TorchrunRank:
    """The variables that torchrun sets in the environment of each process."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int

    @staticmethod
    def read() -> TorchrunRank:
        """Read the environment. ValueError in a process that torchrun has not started."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
        if missing := [name for name in (*names, "MASTER_ADDR") if name not in os.environ]:
            raise ValueError(
                f"runtime.cluster: `torchrun` is for processes that torchrun has started ({missing[0]} is not set): "
                "coalign launch torchrun CONFIG"
            )
        rank, size, local_rank, local_size, port = (int(os.environ[name]) for name in names)
        return TorchrunRank(rank, size, local_rank, local_size, os.environ["MASTER_ADDR"], port)

    @property
    def on_one_machine(self) -> bool:
        return self.local_size == self.size

    @property
    def driver(self) -> str | tuple[str, int]:
        """Where the driver listens: a Unix socket, or on several machines the port after torchrun's own."""
        if not self.on_one_machine:
            return self.address, self.port + 1
        folder = Path(tempfile.gettempdir(), f"coalign-{os.getuid()}")
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()  # a link, which somebody else may have put there, is open to all
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise ValueError(f"{folder} belongs to others, or is open to them: it has to be your own (chmod 700)")
        return str(folder / f"{self.port}.sock")

    def read_token(self) -> bytes | None:
        """Read the secret of the job; None on one machine, where the directory of the socket keeps others out."""
        if self.on_one_machine:
            return None
        if not (token := os.environ.get(TOKEN)):
            raise ValueError(
                f"{TOKEN} is not set: the processes of several machines know each other by a secret in their "
                f"environment, the same on all: export {TOKEN}=$(openssl rand -hex 32)"
            )
        return token.encode()

    def choose_device(self, accelerator: str) -> None:
        """Let this process see only its local rank's device, before a library counts them."""
        device_type = find_accelerator(accelerator)
        names = device_type.list_names(self.local_size)
        if device_type.device != "cpu" and self.local_rank < len(names):
            os.environ[device_type.visible] = names[self.local_rank]


class _RankConnection:
    """The driver's connection to another process: calls are sent at once, and answered in their order."""

    def __init__(self, rank: int, connection: Connection) -> None:
        self._rank, self._connection = rank, connection
        self._waiting: deque[WorkerTask] = deque()  # tasks without an answer, oldest first
        self._sending = threading.Lock()
        self._lost = False
        start_thread(self._receive, f"coalign-rank-{rank}")

    def send(self, worker: str, message: tuple[Any, ...]) -> WorkerTask:
        task = WorkerTask(worker, concurrent.futures.Future(), LocalReference())
        with self._sending:
            self._waiting.append(task)
            try:
                if self._lost:
                    raise EOFError
                self._connection.send_bytes(pickle.dumps(message))
            except (OSError, EOFError):
                self._fail()
        return task

    def close(self) -> None:
        """Tell the process that the run has ended."""
        with self._sending, suppress(OSError):
            self._connection.send_bytes(pickle.dumps(None))

    def _receive(self) -> None:
        while True:
            try:
                meta, payload = pickle.loads(self._connection.recv_bytes())
            except (OSError, EOFError):
                self._lost = True
                return self._fail()
            task = self._waiting.popleft()
            task.payload.value = payload
            task.meta.set_result(meta)

    def _fail(self) -> None:
        """Fail the tasks that wait for answers: the process has ended."""
        while self._waiting:
            with suppress(IndexError, concurrent.futures.InvalidStateError):
                self._waiting.popleft().meta.set_exception(RuntimeError(f"the process of rank {self._rank} has ended"))


class _RankWorker:
    """A handle to the worker of one model in another process."""

    def __init__(self, name: str, model: str, threads: int | None, connection: _RankConnection) -> None:
        self.name, self._model, self._threads, self._connection = name, model, threads, connection

    def execute(self, verb: str, *arguments: Any) -> WorkerTask:
        return self._connection.send(self.name, (self._model, self._threads, verb, _collect_rows(arguments)))

    def replace(self) -> _RankWorker:
        raise RuntimeError(f"{self.name} is a process that torchrun started, and torchrun alone can start it again")


def _collect_rows(value: Any) -> Any:
    """Replace references to rows by the rows themselves, which only this process has."""
    if isinstance(value, WorkerRows):
        batch = value.gather(LocalStore())
        return WorkerRows((LocalReference(batch),), np.zeros(len(batch), np.int64), np.arange(len(batch)))
    if isinstance(value, tuple | list):
        return type(value)(map(_collect_rows, value))
    return {name: _collect_rows(item) for name, item in value.items()} if isinstance(value, dict) else value


class TorchrunCluster(LocalCluster):
    """Runs each model on the first processes of torchrun, starting with this one (rank 0).

    A process computes one call at a time, and models stay on its device: `runtime.colocation` moves none away.
    """

    def __init__(self, config: RunConfig, models: Mapping[str, ModelConfig] | None = None) -> None:
        self._local = TorchrunRank.read()
        self._local.choose_device(config.runtime.accelerator)
        runtime = config.runtime.model_copy(update={"colocation": []})
        super().__init__(config.model_copy(update={"runtime": runtime}), models)
        self._connections = _accept_ranks(self._local)

    def _place(self) -> tuple[list[Node], dict[str, list[ProcessPlacement]]]:
        """Place rank r of each model on process r. ValueError for a model with another number of processes."""
        placements, size = {}, self._local.size
        for name, slot in self.slots.items():
            needs = slot.footprints[name]
            if needs.processes not in (1, size) or needs.devices > 1:
                raise ValueError(
                    f"models.{name} asks for {needs.processes} processes with {max(needs.devices, 1)} device(s), and "
                    f"torchrun started {size}, with one each: num_process, or num_gpu, has to be that number"
                )
            device = (str(self._local.local_rank),) if needs.devices else ()
            placements[name] = [ProcessPlacement(rank, device) for rank in range(needs.processes)]
        return [Node(f"rank {rank}", 1, 1) for rank in range(size)], placements

    def _start(self, name: str, slot: Slot, threads: int | None, spmd: bool, exclusive: bool) -> list[DistActor]:
        count, role = len(self.placements[name]), "rank" if spmd else "replica"
        first = LocalWorker(f"{name}, {role} 0", Worker(self.store, threads), self._cpu)
        remote = [
            _RankWorker(f"{name}, {role} {rank}", name, threads, self._connections[rank]) for rank in range(1, count)
        ]
        ranks: list[WorkerHandle] = [first, *remote]
        device = f"{self._device}:0" if slot.devices else "cpu"  # each process sees only its own device
        if not spmd:
            return [DistActor([rank], device) for rank in ranks]
        return [DistActor(ranks, device, self.find_rendezvous(ranks))]

    def find_rendezvous(self, ranks: Sequence[WorkerHandle]) -> str | None:
        if len(ranks) == 1:
            return None
        host = "127.0.0.1" if self._local.on_one_machine else self._local.address
        with socket.create_server((host, 0)) as probe:
            return f"{host}:{probe.getsockname()[1]}"

    def _kill(self) -> None:
        """End the other processes, once they have done what they were asked."""
        for connection in self._connections.values():
            connection.close()


def _accept_ranks(local: TorchrunRank) -> dict[int, _RankConnection]:
    """Wait for the other processes. ValueError if they do not come in time."""
    connections: dict[int, _RankConnection] = {}
    if local.size == 1:
        return connections
    if isinstance(local.driver, str):
        Path(local.driver).unlink(missing_ok=True)  # a run that was killed leaves its socket
    with Listener(local.driver, backlog=local.size, authkey=local.read_token()) as listener:
        accepting = begin_in_thread(partial(_accept, listener, local.size - 1, connections), "coalign-accept")
        if not concurrent.futures.wait([accepting], JOIN_SECONDS).done:
            missing = sorted({*range(1, local.size)} - {*connections})
            raise ValueError(f"of {local.size} processes of torchrun these did not come: ranks {missing}")
        accepting.result()
    return connections


def _accept(listener: Listener, count: int, connections: dict[int, _RankConnection]) -> None:
    while len(connections) < count:
        try:
            connection = listener.accept()
        except (AuthenticationError, EOFError, ConnectionError):
            continue  # a stranger, or a process that has left
        rank = pickle.loads(connection.recv_bytes())
        connections[rank] = _RankConnection(rank, cast(Connection, connection))


def serve_rank(accelerator: str) -> int:
    """Serve the driver's calls in this process, which is not rank 0, until the run ends; returns the exit code.

    Signals are the driver's business: it saves, and then ends this process.
    """
    local = TorchrunRank.read()
    local.choose_device(accelerator)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    connection = _reach_driver(local)
    connection.send_bytes(pickle.dumps(local.rank))
    workers: dict[str, Worker] = {}
    calls = CallQueue("rank")

    def answer(result: tuple[Any, Any]) -> None:
        with suppress(OSError):  # the driver has ended, as the loop below sees
            connection.send_bytes(pickle.dumps(result))

    while True:
        try:
            message = pickle.loads(connection.recv_bytes())
        except (OSError, EOFError):
            return 1
        if message is None:
            return 0
        model, threads, verb, arguments = message
        if model not in workers:
            workers[model] = Worker(LocalStore(), threads)
        calls.submit(partial(workers[model].execute, verb, *arguments), answer)


def _reach_driver(local: TorchrunRank) -> Connection:
    """Connect to the driver, which first loads data. If it ends before, torchrun ends this process."""
    token = local.read_token()
    while True:
        try:
            return cast(Connection, Client(local.driver, authkey=token))
        except AuthenticationError:
            raise ValueError(
                f"{TOKEN}: the driver at {local.address} has another secret; it is the same on all"
            ) from None
        except (FileNotFoundError, ConnectionError, EOFError):
            time.sleep(LOOK_SECONDS)
