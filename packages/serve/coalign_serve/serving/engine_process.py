"""Engines in processes of their own, for several replicas of a model behind one server."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from multiprocessing.connection import Connection

import torch

from coalign.cluster.placement.nodes import find_device_kind
from coalign.config.functions import resolve_class
from coalign.config.schema import ImagesConfig, ModelConfig
from coalign.processes.host import count_processors
from coalign.roles import Context
from coalign.threads import start_thread
from coalign_serve.config.serving import CompletionServerConfig
from coalign_serve.judges import choose_device
from coalign_serve.run_model import fetch_in_dtype
from coalign_serve.serving.engine_loop import (
    ENDED,
    AnswerEnd,
    CompletionEngine,
    EngineLoop,
    GenerationJob,
    JobEvent,
    JobFailure,
    OnEvent,
)

log = logging.getLogger(__name__)
END_SECONDS = 5.0  # how long a process may take to end


def build_model_config(config: CompletionServerConfig) -> ModelConfig:
    """Return the settings of the engine's model, and fetch it. Raises what `fetch_in_dtype` raises."""
    limit = {"max_num_seqs" if config.engine == "vllm" else "max_sequences": config.max_sequences}
    settings = {"module": config.engine, "load": config.model, config.engine: limit}
    settings |= {} if config.images is None else {"vision": {}}
    return fetch_in_dtype(ModelConfig.model_validate(settings), config.dtype, choose_device(config.device))


def start_engine(model: ModelConfig, device: str, seed: int, images: ImagesConfig | None = None) -> EngineLoop:
    """Load a model into an engine in this process. Raises ValueError for a directory that holds none."""
    module_class = resolve_class(model.module, "coalign.backends")
    context = Context(seed=seed, device=choose_device(device), images=images, tokens_only=True)
    module = module_class(model, context)
    module.setup()
    module.ensure_weights()
    return EngineLoop(module)


@dataclass(frozen=True)
class _Engine:
    """What the process of an engine needs to start; ``visible``: environment variables that show it its device."""

    model: ModelConfig
    device: str
    seed: int
    images: ImagesConfig | None
    visible: dict[str, str]
    threads: int | None

    def run(self, connection: Connection) -> None:
        """Compute jobs for whoever holds the other end of the connection, until that is closed."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the server, which ends its engines
        os.environ.update(self.visible)
        if self.threads:
            torch.set_num_threads(self.threads)
        sending, cuts = threading.Lock(), dict[int, Callable[[], None]]()

        def send(message: object) -> None:
            with sending:
                connection.send(message)

        try:
            loop = start_engine(self.model, self.device, self.seed, self.images)
        except Exception as error:
            return send(_as_sendable(error))
        send(None)
        try:
            while True:
                number, job = connection.recv()
                if isinstance(job, GenerationJob):
                    cuts[number] = loop.submit(job, lambda event, number=number: send((number, event)))
                elif number in cuts:
                    cuts.pop(number)() if job else cuts.pop(number)
        except (EOFError, OSError):
            loop.close()


def _as_sendable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class EngineProcess(CompletionEngine):
    """An engine in another process. ``wait`` until it has loaded its model."""

    def __init__(self, engine: _Engine, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=engine.run, args=(theirs,), name=f"coalign-engine-{number}")
        self._process.start()
        theirs.close()
        self._number = number
        self._lock = threading.Lock()  # guards sending, and the jobs
        self._jobs: dict[int, tuple[OnEvent, int]] = {}  # job -> its listener, and how many of its answers are missing
        self._numbers = count()
        self._failure: str | None = None

    @property
    def failure(self) -> str | None:
        return self._failure

    @property
    def load(self) -> int:
        """Answers that this engine computes, or that wait for it."""
        return sum(missing for _, missing in list(self._jobs.values()))

    def wait(self) -> None:
        """Wait until the model is loaded. Raises what its loading raised, RuntimeError if the process has ended."""
        try:
            problem = self._connection.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(self._describe_end()) from None
        if problem is not None:
            raise problem
        start_thread(self._listen, f"coalign-engine-{self._number}")

    def submit(self, job: GenerationJob, on_event: OnEvent) -> Callable[[], None]:
        with self._lock:
            number = next(self._numbers)
            if self._failure is None:
                self._jobs[number] = on_event, job.samples
                self._send((number, job))
                return partial(self._cut, number)
        on_event(JobFailure(self._failure, is_refused=False))
        return lambda: None

    def close(self) -> None:
        with self._lock:
            self._failure = self._failure or ENDED
            self._connection.close()
        self._process.join(END_SECONDS)
        if self._process.is_alive():
            self._process.kill()

    def _cut(self, number: int) -> None:
        with self._lock:
            if number in self._jobs:
                self._send((number, True))

    def _send(self, message: object) -> None:
        try:
            self._connection.send(message)
        except OSError:  # it has ended; the thread that listens will say so
            log.debug("engine %d does not take a message", self._number)

    def _listen(self) -> None:
        try:
            while True:
                number, event = self._connection.recv()
                self._hear(number, event)
        except (EOFError, OSError):
            self._process.join(END_SECONDS)
        with self._lock:
            if self._failure is None:
                self._failure = self._describe_end()
                log.error("%s", self._failure)
            jobs, self._jobs = self._jobs, {}
        for on_event, _ in jobs.values():
            on_event(JobFailure(self._failure, is_refused=False))

    def _hear(self, number: int, event: JobEvent) -> None:
        on_event, missing = self._jobs[number]
        if isinstance(event, AnswerEnd | JobFailure):
            missing = 0 if isinstance(event, JobFailure) else missing - 1
            with self._lock:
                if missing:
                    self._jobs[number] = on_event, missing
                else:
                    del self._jobs[number]
                    self._send((number, False))  # its cut is not needed any more
        on_event(event)

    def _describe_end(self) -> str:
        return f"the process of engine {self._number} has ended (exit code {self._process.exitcode})"


class EngineReplicas(CompletionEngine):
    """Gives each job to the living replica with the least to do."""

    def __init__(self, replicas: Sequence[EngineProcess]) -> None:
        self._replicas = replicas

    @property
    def failure(self) -> str | None:
        failures = [replica.failure for replica in self._replicas]
        return None if None in failures else failures[0]

    def submit(self, job: GenerationJob, on_event: OnEvent) -> Callable[[], None]:
        living = [replica for replica in self._replicas if replica.failure is None] or self._replicas
        return min(living, key=lambda replica: replica.load).submit(job, on_event)

    def close(self) -> None:
        for replica in self._replicas:
            replica.close()


def start_replicas(model: ModelConfig, config: CompletionServerConfig) -> EngineReplicas:
    """Start the engines of a server. Raises what loading a model raises, ValueError without enough devices."""
    replicas = [EngineProcess(engine, i) for i, engine in enumerate(_plan_engines(model, config))]
    try:
        for replica in replicas:
            replica.wait()
    except BaseException:
        for replica in replicas:
            replica.close()
        raise
    return EngineReplicas(replicas)


def _plan_engines(model: ModelConfig, config: CompletionServerConfig) -> list[_Engine]:
    """Give each engine a device of its own, or an equal share of the cores."""
    number, device = config.replicas, choose_device(config.device)
    if device == "cpu":
        threads = max(1, count_processors() // number)
        return [_Engine(model, device, config.seed, config.images, {}, threads)] * number
    device_type, _, index = device.partition(":")
    available = torch.accelerator.device_count()
    if index or available < number:
        available_text = f"`device: {device}` names one" if index else f"this machine has {available}"
        raise ValueError(f"replicas: {number} engines need a device each, and {available_text}")
    accelerator = find_device_kind(device_type)
    names = accelerator.list_names(available)
    visible = [{accelerator.visible: name} for name in names[:number]]
    return [_Engine(model, device_type, config.seed, config.images, environment, None) for environment in visible]
