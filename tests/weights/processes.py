"""Models whose ranks are processes of their own: what a transport asks of a cluster, without starting one."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch

from coalign.cluster.batch_ref import WorkerFailure
from coalign.cluster.future import WorkerError
from coalign.roles import Context

SECONDS = 90


class FileStore:
    """An object store: values by reference."""

    in_process = False

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory(prefix="coalign-store-")

    def put(self, value):
        with tempfile.NamedTemporaryFile(dir=self._folder.name, delete=False) as file:
            pickle.dump(value, file)
        return file.name

    def close(self):
        self._folder.cleanup()

    def get(self, reference):
        return pickle.loads(Path(reference).read_bytes())


class Processes:
    """``module`` on ``ranks`` processes, of one group or each a replica."""

    def __init__(self, name, module, ranks=1, *, turns=False, device="cpu"):
        # A fork has everything imported; CUDA does not survive one.
        processes = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
        self.name, self.turns = name, turns
        self.store = FileStore()
        self.syncing = threading.Lock()
        self.slices = None
        self._lane = ThreadPoolExecutor(1)
        self._pipes, self._processes = [], []
        for rank in range(ranks):
            ours, theirs = processes.Pipe()
            place = {"rank": rank, "world_size": ranks} if module.spmd else {}
            context = Context(model=name, threads=1, device=device, **place)
            process = processes.Process(target=_serve, args=(theirs, module, context, self.store), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function, *arguments, fatal=True):
        return self._lane.submit(self._everywhere, function, arguments)

    def takes_turns_with(self, other):
        return self.turns

    def call(self, method, *arguments):
        """A method of the module, on every rank."""
        return self.run(_method, method, arguments).result()

    def close(self):
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._lane.shutdown(wait=False)
        self.store.close()

    def _everywhere(self, function, arguments):
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # who has died does not answer
                pipe.send((function, arguments))
        results = [self._answer(rank, function.__name__) for rank in range(len(self._pipes))]
        for result in results:
            if isinstance(result, WorkerError):
                raise result
        return results

    def _answer(self, rank, label):
        where = f"{self.name}, rank {rank}"
        try:
            assert self._pipes[rank].poll(SECONDS), f"{where} does not answer"
            result, problem = self._pipes[rank].recv()
        except EOFError:
            return WorkerError(label, where, WorkerFailure("worker lost", "it died", ""))
        if problem is None:
            return result
        return WorkerError(label, where, WorkerFailure(type(problem).__name__, str(problem), "", problem))


def _serve(pipe, module, context, store):
    torch.set_num_threads(1)
    worker = module(None, context)
    worker.setup()
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = function(worker, store, *arguments), None
        except Exception as problem:
            answer = None, problem
        pipe.send(answer)


def _method(module, store, method, arguments):
    return getattr(module, method)(*arguments)
