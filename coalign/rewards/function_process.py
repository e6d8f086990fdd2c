"""Runs the reward functions that people write in processes, which may hang or die: they are killed and replaced.

A function can hold the interpreter (a regular expression that backtracks, say), exit, or crash. In a thread of the run
each of these would end the run. Here the call that did it fails, and a new process makes the next one.

Not `pebble` or `multiprocessing`: their processes import the main script again, and unpickle samples with torch.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import cloudpickle
from torch import Tensor

from coalign.threads import CallResult, CallTimeout
from coalign.types import Sample

_PROGRAM = Path(__file__).with_name("function_program.py")
_START_SECONDS = 300.0  # importing a function's module, and torch, on a busy machine
_PROCESSES = min(16, (os.cpu_count() or 1) + 4)  # of a plain function, which may wait for something
_GROW_SECONDS = 0.1  # for which calls wait before another process is started
_GRACE = 1.0  # seconds in which an event loop answers if nothing blocks it
_LAZY = ("tokens", "loss_mask", "logprobs", "turn_rewards", "status")  # fields that need torch to be read


class ProcessDied(RuntimeError):
    """The process of a reward function ended during a call, or was killed."""


class FunctionTraceback(Exception):
    """The traceback of an exception in another process, as text."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}\n"""'


class FunctionPool:
    """The processes of one function: started when needed, replaced when dead. Belongs to one event loop.

    A plain function has one call at a time in each of up to 16 processes. A class (or an object) has state, so it has
    one process, or as many as its attribute ``at_once`` says. An async function has one process with an event loop.
    Raises what pickling raises for an object that cannot be sent to a process.
    """

    def __init__(self, name: str, fn: Callable[..., Any], arguments: Mapping[str, Any], is_async: bool) -> None:
        self._name, self._is_async = name, is_async
        self._function = cloudpickle.dumps((fn, dict(arguments)))
        processes = getattr(fn, "at_once", None) or (_PROCESSES if inspect.isfunction(fn) else 1)
        self._most = 1 if is_async else processes
        self._free: asyncio.Semaphore | None = None
        self._start_seconds = 0.0  # which the first process took
        self._idle: list[FunctionProcess] = []
        self._all: set[FunctionProcess] = set()

    async def start(self) -> None:
        """Start a process if there is none. Raises what loading the function or making an instance raises."""
        if any(not process.is_dead for process in self._all):
            return
        process, began = self._take(), time.monotonic()
        try:
            await process.start()
        finally:
            self._put_back(process)
        self._start_seconds = time.monotonic() - began

    async def run(self, arguments: Sequence[Sample | list[Sample]], seconds: float) -> list[CallResult]:
        """The result of every call, in order. It is CallTimeout or ProcessDied where the process was lost."""
        if self._is_async:
            return await self._run_async(arguments, seconds)
        try:
            await self.start()
        except Exception as error:
            return [(None, error)] * len(arguments)
        self._free = self._free or asyncio.Semaphore(self._most)
        todo, results, empty = deque(enumerate(arguments)), {}, asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for number in range(min(self._most, len(arguments))):
                # Another process is worth its start if calls wait for longer than that.
                pause = max(_GROW_SECONDS, self._start_seconds) * max(0, number + 1 - len(self._all))
                group.create_task(self._work_off(todo, empty, results, seconds, pause))
        return [results[position] for position in range(len(arguments))]

    def close(self) -> None:
        """Kill all processes."""
        for process in self._all:
            process.kill()
        self._all.clear()
        self._idle.clear()

    async def _work_off(
        self,
        todo: deque[tuple[int, Sample | list[Sample]]],
        empty: asyncio.Event,
        results: dict[int, CallResult],
        seconds: float,
        pause: float,
    ) -> None:
        assert self._free is not None
        if pause:
            with suppress(TimeoutError):
                await asyncio.wait_for(empty.wait(), pause)
        while todo:
            async with self._free:
                if not todo:
                    return
                position, argument = todo.popleft()
                if not todo:
                    empty.set()
                process = self._take()
                try:
                    results[position] = await process.call(argument, seconds)
                finally:
                    self._put_back(process)

    async def _run_async(
        self, arguments: Sequence[Sample | list[Sample]], seconds: float, width: int = 256
    ) -> list[CallResult]:
        """Calls that were lost with their process are repeated, fewer at a time, so that the guilty one fails alone."""
        beside = asyncio.Semaphore(width)

        async def call(argument: Sample | list[Sample]) -> CallResult:
            async with beside:
                process = self._share()
                try:
                    await process.start()
                except Exception as error:
                    return None, error
                self._free = self._free or asyncio.Semaphore(process.at_once or width)
                async with self._free:
                    return await self._share().call(argument, seconds)

        results = list(await asyncio.gather(*map(call, arguments)))
        lost = [i for i, (_, error) in enumerate(results) if isinstance(error, ProcessDied)]
        if width > 1 and lost:
            again = await self._run_async([arguments[i] for i in lost], seconds, width // 16)
            for i, result in zip(lost, again, strict=True):
                results[i] = result
        return results

    def _take(self) -> FunctionProcess:
        self._idle = [process for process in self._idle if not process.is_dead]
        if not self._idle:
            self._all = {process for process in self._all if not process.is_dead}
            process = FunctionProcess(self._name, self._function, self._is_async)
            self._all.add(process)
            return process
        return self._idle.pop()

    def _share(self) -> FunctionProcess:
        process = self._take()
        self._put_back(process)
        return process

    def _put_back(self, process: FunctionProcess) -> None:
        if not process.is_dead:
            self._idle.append(process)


class FunctionProcess:
    """The parent's end of one process, which starts with the first call."""

    def __init__(self, name: str, function: bytes, is_async: bool) -> None:
        self.name, self.at_once, self.is_dead = name, None, False
        self._function, self._is_async = function, is_async
        self._numbers = itertools.count(1)
        self._calls: dict[int, asyncio.Future[CallResult]] = {}
        self._started: asyncio.Task[None] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._slow_until = 0.0  # until then an import delays calls

    async def start(self) -> None:
        """Start the process and wait for its function. Raises what loading the function raises."""
        if self._started is None:
            self._started = asyncio.get_running_loop().create_task(self._start())
        await asyncio.shield(self._started)

    async def call(self, argument: Sample | list[Sample], seconds: float) -> CallResult:
        """What the function returned or raised. A process that is later than ``seconds`` is killed."""
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        try:
            await self.start()
            self._send((number, _pack(argument)))
        except Exception as error:
            return None, error
        answer = self._calls[number] = loop.create_future()
        began = loop.time()
        try:
            while (left := max(began, self._slow_until) + seconds - loop.time()) > 0 and not answer.done():
                await asyncio.wait([answer], timeout=left)
            if not answer.done():
                await self._cancel(number, answer)
            if answer.done() and not answer.cancelled():
                return answer.result()
            if answer.cancelled() or len(self._calls) == 1:
                return None, CallTimeout(seconds)
            return None, ProcessDied(f"the process of '{self.name}' was killed: a call has blocked its event loop")
        finally:
            if not answer.done():
                self.kill()
            del self._calls[number]

    def kill(self) -> None:
        """End the process; its calls have failed."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        self._end("was killed")

    async def _cancel(self, number: int, answer: asyncio.Future[CallResult]) -> None:
        """Give a late call the time to arrive, or its event loop to say that it has cancelled it."""
        if self._is_async and not self.is_dead:
            self._send((number, None))
        await asyncio.wait([answer], timeout=_GRACE if self._is_async else 0.01)

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-u", "-P", str(_PROGRAM), str(theirs.fileno())]
        with theirs:
            # A session of its own: Ctrl-C is for the run, which ends its processes itself.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        ready = self._calls[0] = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read(reader))
        self._send((sys.path, self._function, self._is_async))
        done, _ = await asyncio.wait([ready], timeout=_START_SECONDS)
        del self._calls[0]
        self.at_once, error = ready.result() if done else (None, CallTimeout(_START_SECONDS))
        if error is not None:
            self.kill()
            raise error

    def _send(self, message: Any) -> None:
        if self.is_dead or self._writer is None:
            raise ProcessDied(f"the process of '{self.name}' has ended")
        data = pickle.dumps(message)
        self._writer.write(struct.pack("!I", len(data)) + data)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                (size,) = struct.unpack("!I", await reader.readexactly(4))
                self._handle(*pickle.loads(await reader.readexactly(size)))
        except (asyncio.IncompleteReadError, OSError):
            self._end("ended")

    def _handle(self, number: int, kind: str, payload: bytes) -> None:
        now = asyncio.get_running_loop().time()
        if kind in ("slow", "fast"):
            self._slow_until = now + _START_SECONDS * (kind == "slow")
        answer = self._calls.get(number)
        if answer is None or answer.done():
            return
        if kind == "cancelled":
            answer.cancel()
            return
        try:
            value = pickle.loads(payload)
        except Exception as problem:
            answer.set_result((None, problem))
            return
        if kind != "error":
            answer.set_result((value, None))
            return
        error, trace = value
        error.__cause__ = FunctionTraceback(trace)
        answer.set_result((None, error))

    def _end(self, how: str) -> None:
        if self.is_dead or self._process is None:
            self.is_dead = True
            return
        self.is_dead = True
        try:
            code = self._process.wait(timeout=_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if self._writer is not None:
            self._writer.close()
        if how == "ended":
            how = f"exited with code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
        for answer in self._calls.values():
            if not answer.done():
                answer.set_result((None, ProcessDied(f"the process of '{self.name}' {how} during a call")))


def _pack(argument: Sample | list[Sample]) -> Any:
    """A sample as (fields, those that need torch): its status as an int, tensors as their dtype's name and bytes."""
    if isinstance(argument, list):
        return [_pack(one) for one in argument]
    values = {field.name: getattr(argument, field.name) for field in fields(Sample)}
    lazy = {name: _pack_tensor(values.pop(name)) for name in _LAZY}
    return values, lazy


def _pack_tensor(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value if value is None else int(value)
    return str(value.dtype).removeprefix("torch."), value.cpu().numpy().tobytes()
