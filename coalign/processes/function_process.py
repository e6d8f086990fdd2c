"""Runs people's functions in processes of their own; one that hangs or dies is killed and replaced.

A function can hold the interpreter (a regular expression that backtracks, say), exit, or crash. In a thread of the run
each of these would end the run. Here the call that did it fails, and a new process makes the next one.

Not `pebble` or `multiprocessing`: their processes import the main script again, and unpickle samples with torch.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from pickle import PicklingError
from random import Random
from typing import Any, cast
from weakref import WeakKeyDictionary

import cloudpickle
from torch import Tensor

from coalign.companions import list_modules
from coalign.config.functions import is_bound_to_process
from coalign.processes.function_program import CALL, CANCEL, CANCELLED, ERROR, FAST, HEADER, READY, SLOW, START
from coalign.processes.host import count_processors
from coalign.threads import CallResult, CallTimeout
from coalign.types import Sample

log = logging.getLogger(__name__)

_PROGRAM = Path(__file__).with_name("function_program.py")
_START_SECONDS = 300.0  # importing a function's module, and torch, on a busy machine
_MAX_PROCESSES = min(16, count_processors() + 4)  # more than cores: a function may wait for something
_GROW_SECONDS = 0.1  # calls that wait for longer get another process
_GRACE = 1.0  # seconds in which an event loop answers if nothing blocks it
_PREFETCH_SECONDS, _MAX_PREFETCHED = 0.01, 64  # calls queued at a process: their seconds of work, and their number
_LAZY = ("tokens", "loss_mask", "logprobs", "turn_rewards", "status")  # fields that need torch to be read
_EAGER = tuple(field.name for field in fields(Sample) if field.name not in _LAZY)

Call = Sequence[Any]  # the positional arguments of one call

_pools: WeakKeyDictionary[asyncio.AbstractEventLoop, list[FunctionPool]] = WeakKeyDictionary()
_shared: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Any, FunctionPool | None]] = WeakKeyDictionary()


class ProcessDied(RuntimeError):
    """The process of a function ended during a call, or was killed."""


class _FunctionTraceback(Exception):
    """The traceback of an exception in another process, as text."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}\n"""'


def is_coroutine_function(fn: Callable[..., Any]) -> bool:
    """Whether calls of a function, an object or a class's instances are to be awaited."""
    call = fn.__call__ if inspect.isclass(fn) else fn
    return any(map(inspect.iscoroutinefunction, (call, type(call).__call__)))


def build_pool(
    path: str, fn: Callable[..., Any], arguments: Mapping[str, Any], memory_mb: int | None = None
) -> FunctionPool | None:
    """The processes of the function that a configuration names ``path``; None if it runs in this process.

    Coalign's own functions do, and (with a warning) an object that cannot be pickled.
    """
    if ":" not in path or path.partition(":")[0].partition(".")[0] in list_modules():
        return None
    try:
        return FunctionPool(path, fn, arguments, memory_mb)
    except (PicklingError, TypeError, AttributeError) as error:
        if not is_bound_to_process(path):
            raise
        name = getattr(fn, "__name__", type(fn).__name__)
        log.warning(
            "function '%s' runs in this process, which it can hang or end: it cannot be pickled (%s)", name, error
        )
        return None


def share_pool(path: str, fn: Callable[..., Any], arguments: Mapping[str, Any]) -> FunctionPool | None:
    """Build a pool as `build_pool` does, once for a function and its arguments on the running event loop."""
    pools = _shared.setdefault(asyncio.get_running_loop(), {})
    key = fn, repr(sorted(arguments.items()))
    if key not in pools:
        pools[key] = build_pool(path, fn, arguments)
    return pools[key]


def close_pools(loop: asyncio.AbstractEventLoop) -> None:
    """Kill all processes of the pools that ran on an event loop; called on it."""
    for pool in _pools.pop(loop, []):
        pool.close()


class FunctionPool:
    """The processes of one function: started when needed, replaced when dead. Belongs to one event loop.

    A plain function has up to 16 processes, each of which makes its calls one by one. A class (or an object) has state,
    so it has one process, or as many as its attribute ``at_once`` says. An async function has one process with an event
    loop. ``memory_mb`` limits the memory of each. Raises what pickling raises for an object that cannot be pickled.
    """

    def __init__(
        self, name: str, fn: Callable[..., Any], arguments: Mapping[str, Any], memory_mb: int | None = None
    ) -> None:
        self.is_async = is_coroutine_function(fn)
        function = cloudpickle.dumps((fn, dict(arguments)))
        self._create = partial(_FunctionProcess, name, function, self.is_async, memory_mb)
        processes = getattr(fn, "at_once", None) or (_MAX_PROCESSES if inspect.isfunction(fn) else 1)
        self._max_processes = 1 if self.is_async else processes
        self._free: asyncio.Semaphore | None = None
        self._start_seconds = 0.0  # start-up time of the first process
        self._idle: list[_FunctionProcess] = []
        self._all: set[_FunctionProcess] = set()

    async def start(self) -> None:
        """Start a process if there is none. Raises what loading the function or making an instance raises."""
        if any(not process.is_dead for process in self._all):
            return
        _pools.setdefault(asyncio.get_running_loop(), []).append(self)
        process, began = self._take(), time.monotonic()
        try:
            await process.start()
        finally:
            self._put_back(process)
        self._start_seconds = time.monotonic() - began

    async def run(self, calls: Sequence[Call], seconds: float) -> list[CallResult]:
        """The result of every call, in order. It is CallTimeout or ProcessDied where the process was lost."""
        try:
            await self.start()
        except Exception as error:
            return [(None, error)] * len(calls)
        if self.is_async:
            return await self._run_async(calls, seconds)
        self._free = self._free or asyncio.Semaphore(self._max_processes)
        work = _PendingCalls(calls, seconds, self._max_processes)
        async with asyncio.TaskGroup() as group:
            for number in range(min(self._max_processes, len(calls))):
                # Another process is worth its start if calls wait for longer than that.
                pause = max(_GROW_SECONDS, self._start_seconds) * max(0, number + 1 - len(self._all))
                group.create_task(self._work_off(work, pause))
        return [work.results[position] for position in range(len(calls))]

    async def call(self, arguments: Call, seconds: float) -> Any:
        """What one call returns. Raises what it raises, CallTimeout or ProcessDied."""
        ((value, error),) = await self.run([arguments], seconds)
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """Kill all processes."""
        for process in self._all:
            process.kill()
        self._all.clear()
        self._idle.clear()

    async def _work_off(self, work: _PendingCalls, pause: float) -> None:
        assert self._free is not None
        if pause:
            with suppress(TimeoutError):
                await asyncio.wait_for(work.is_empty.wait(), pause)
        while work.todo:
            async with self._free:
                if not work.todo:
                    return
                process = self._take()
                try:
                    await process.work_off(work)
                finally:
                    self._put_back(process)

    async def _run_async(self, calls: Sequence[Call], seconds: float, width: int = 256) -> list[CallResult]:
        """Repeat calls that were lost with their process, fewer at a time, so that the guilty one fails alone."""
        beside = asyncio.Semaphore(width)

        async def run_one(arguments: Call) -> CallResult:
            async with beside:
                process = self._share()
                try:
                    await process.start()
                except Exception as error:
                    return None, error
                self._free = self._free or asyncio.Semaphore(process.at_once or width)
                async with self._free:
                    return await self._share().call(arguments, seconds)

        results = list(await asyncio.gather(*map(run_one, calls)))
        lost = [i for i, (_, error) in enumerate(results) if isinstance(error, ProcessDied)]
        if width > 1 and lost:
            again = await self._run_async([calls[i] for i in lost], seconds, width // 16)
            for i, result in zip(lost, again, strict=True):
                results[i] = result
        return results

    def _take(self) -> _FunctionProcess:
        self._idle = [process for process in self._idle if not process.is_dead]
        if not self._idle:
            self._all = {process for process in self._all if not process.is_dead}
            process = self._create()
            self._all.add(process)
            return process
        return self._idle.pop()

    def _share(self) -> _FunctionProcess:
        process = self._take()
        self._put_back(process)
        return process

    def _put_back(self, process: _FunctionProcess) -> None:
        if not process.is_dead:
            self._idle.append(process)


class _PendingCalls:
    """The calls that several processes share: those still to make, and the results by position."""

    def __init__(self, calls: Sequence[Call], seconds: float, processes: int) -> None:
        self.todo, self.seconds = deque(enumerate(calls)), seconds
        self.results: dict[int, CallResult] = {}
        self.is_empty = asyncio.Event()
        self._processes = processes

    def take(self, max_calls: int) -> list[tuple[int, Call]]:
        """Take up to ``max_calls``; towards the end fewer, so that no process keeps calls which others could make."""
        count = min(max_calls, len(self.todo), 1 + len(self.todo) // self._processes)
        taken = [self.todo.popleft() for _ in range(count)]
        if not self.todo:
            self.is_empty.set()
        return taken


class _FunctionProcess:
    """The parent's end of one process, which starts with the first call."""

    def __init__(self, name: str, function: bytes, is_async: bool, memory_mb: int | None) -> None:
        self.name, self.at_once, self.is_dead = name, None, False
        self._function, self._is_async, self._memory_mb = function, is_async, memory_mb
        self._numbers = itertools.count(1)
        self._calls: dict[int, Callable[[CallResult], Any]] = {}  # what to do with each answer; the oldest comes first
        self._random: dict[int, list[Random]] = {}  # generators among the arguments, by call
        self._started: asyncio.Task[None] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._connection = _ProcessConnection(self._handle, lambda: self._end("ended"))
        self._slow_until = 0.0  # until then an import delays calls
        self._answered = 0.0  # when the last answer came
        self._low, self._news = 0, asyncio.Event()  # set once no more than `_low` calls are under way
        self._death = ""

    async def start(self) -> None:
        """Start the process and wait for its function. Raises what loading the function raises."""
        if self._started is None:
            self._started = asyncio.get_running_loop().create_task(self._start())
        await asyncio.shield(self._started)

    async def work_off(self, work: _PendingCalls) -> None:
        """Make calls of ``work``, some of them sent ahead, until none is left or the process is lost.

        A call's time begins with the previous answer. The call that times out, or during which the process dies, has
        failed; those behind it go back.
        """
        try:
            await self.start()
        except Exception as error:
            if work.todo:
                work.results[work.take(1)[0][0]] = None, error
            return
        sent: dict[int, tuple[int, Call]] = {}
        try:
            timed_out = await self._work_ahead(work, sent)
        finally:
            if lost := [sent[number] for number in self._calls]:
                self.kill()  # after a timeout, or if the waiting task was cancelled
                self._calls.clear()
                work.todo.extendleft(reversed(lost[1:]))
        if lost:
            work.results[lost[0][0]] = None, CallTimeout(work.seconds) if timed_out else ProcessDied(self._death)

    async def call(self, arguments: Call, seconds: float) -> CallResult:
        """What an async function returned or raised. A process whose event loop is blocked is killed."""
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        answer: asyncio.Future[CallResult] = loop.create_future()
        try:
            await self.start()
            self._send_call(number, arguments, lambda result: answer.done() or answer.set_result(result))
        except Exception as error:
            return None, error
        self._connection.flush()
        began = loop.time()
        try:
            while (left := max(began, self._slow_until) + seconds - loop.time()) > 0 and not answer.done():
                await asyncio.wait([answer], timeout=left)
            if timed_out := not answer.done():
                self._cancel(number)
                await asyncio.wait([answer], timeout=_GRACE)
        except asyncio.CancelledError:
            self._cancel(number)
            loop.call_later(_GRACE, lambda: self.kill() if number in self._calls else None)
            raise
        if not answer.done():
            alone = len(self._calls) == 1
            self.kill()
            return None, CallTimeout(seconds) if alone else ProcessDied(f"{self._death}: a call blocked its event loop")
        value, error = answer.result()
        cancelled = timed_out and isinstance(error, asyncio.CancelledError)
        return (None, CallTimeout(seconds)) if cancelled else (value, error)

    def kill(self) -> None:
        """End the process; its calls have failed."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        self._end("was killed")

    async def _work_ahead(self, work: _PendingCalls, sent: dict[int, tuple[int, Call]]) -> bool:
        """Send calls and wait for answers; whether one timed out. Calls of about _PREFETCH_SECONDS are sent ahead."""
        loop, prefetched, done = asyncio.get_running_loop(), 1, 0
        since = self._answered = loop.time()
        while (work.todo or self._calls) and not self.is_dead:
            if not self._calls:
                self._answered = loop.time()
            for position, arguments in work.take(prefetched - len(self._calls)):
                number = next(self._numbers)
                sent[number] = position, arguments
                try:
                    self._send_call(number, arguments, partial(work.results.__setitem__, position))
                except Exception as error:  # it cannot be pickled
                    work.results[position] = None, error
            self._connection.flush()
            under_way = len(self._calls)
            await self._wait(under_way // 2, self._find_deadline(work.seconds))
            if self._calls and loop.time() >= self._find_deadline(work.seconds):
                await asyncio.sleep(0.01)  # an answer may have come that nobody has read
                if self._calls and loop.time() >= self._find_deadline(work.seconds):
                    return True
            if done := done + under_way - len(self._calls):
                pace = max((loop.time() - since) / done, 1e-6)  # uvloop's clock stands still within a millisecond
                prefetched = max(1, min(2 * prefetched, _MAX_PREFETCHED, int(_PREFETCH_SECONDS / pace)))
                since, done = loop.time(), 0
        return False

    def _find_deadline(self, seconds: float) -> float:
        return max(self._answered, self._slow_until) + seconds

    async def _wait(self, low: int, deadline: float) -> None:
        """Wait until no more than ``low`` calls are under way, or the process is lost, or for the deadline."""
        self._low = low
        self._news.clear()
        if len(self._calls) > low and not self.is_dead:
            timer = asyncio.get_running_loop().call_at(deadline, self._news.set)
            await self._news.wait()
            timer.cancel()

    def _cancel(self, number: int) -> None:
        """Have an event loop cancel a call, and say that it has."""
        self._connection.send(number, CANCEL)
        self._connection.flush()

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-u", "-P", str(_PROGRAM), str(theirs.fileno())]
        with theirs:
            # A session of its own: Ctrl-C is for the run, which ends its processes itself.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
            )
        self._connection.keep_socket(ours)
        await loop.create_connection(lambda: self._connection, sock=ours)
        ready: asyncio.Future[CallResult] = loop.create_future()
        self._calls[0] = ready.set_result
        self._connection.send(0, START, pickle.dumps((sys.path, self._function, self._is_async, self._memory_mb)))
        self._connection.flush()
        done, _ = await asyncio.wait([ready], timeout=_START_SECONDS)
        self._calls.pop(0, None)
        self.at_once, error = ready.result() if done else (None, CallTimeout(_START_SECONDS))
        if error is not None:
            self.kill()
            raise error

    def _send_call(self, number: int, arguments: Call, settle: Callable[[CallResult], Any]) -> None:
        """Send a call with the next flush; ``settle`` gets its result. Raises what pickling raises, or ProcessDied."""
        if self.is_dead:
            raise ProcessDied(self._death)
        self._connection.send(number, CALL, pickle.dumps([_pack(argument) for argument in arguments]))
        self._calls[number] = settle
        if generators := [argument for argument in arguments if isinstance(argument, Random)]:
            self._random[number] = generators

    def _handle(self, number: int, tag: bytes, payload: bytes) -> None:
        now = asyncio.get_running_loop().time()
        if tag in (SLOW, FAST):
            self._slow_until = now + _START_SECONDS * (tag == SLOW)
        if (settle := self._calls.pop(number, None)) is None:
            return
        self._answered = now
        settle(self._read_result(number, tag, payload))
        if len(self._calls) <= self._low:
            self._news.set()

    def _read_result(self, number: int, tag: bytes, payload: bytes) -> CallResult:
        generators = self._random.pop(number, [])
        if tag == CANCELLED:
            return None, asyncio.CancelledError()
        try:
            content = pickle.loads(payload)
        except Exception as problem:
            return None, problem
        if tag == READY:
            return content, None
        if tag == ERROR:
            error, trace = content
            error.__cause__ = _FunctionTraceback(trace)
            return None, error
        value, states = content
        for generator, state in zip(generators, states, strict=True):
            generator.setstate(state)
        return value, None

    def _end(self, how: str) -> None:
        if self.is_dead:
            return
        self.is_dead = True
        if self._process is None:
            return
        try:
            code = self._process.wait(timeout=_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._connection.close()
        if how == "ended":
            how = f"exited with code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
        limit = f" (its process_memory_mb is {self._memory_mb})" if self._memory_mb else ""
        self._death = f"the process of '{self.name}' {how} during a call{limit}"
        self._news.set()
        for number in list(self._calls):
            if self._is_async or not number:  # a plain function's call in number 0 is its start
                self._calls.pop(number)((None, ProcessDied(self._death)))


class _ProcessConnection(asyncio.Protocol):
    """The parent's end of the socket: hands each message to ``handle``, and says when the other end has gone."""

    def __init__(self, handle: Callable[[int, bytes, bytes], None], report_end: Callable[[], None]) -> None:
        self._handle, self._report_end = handle, report_end
        self._received, self._to_send = bytearray(), list[bytes]()
        self._transport: asyncio.Transport | None = None
        self._socket: socket.socket | None = None

    def keep_socket(self, connected: socket.socket) -> None:
        """Keep the socket beyond the transport, which a failed write ends with answers unread."""
        self._socket = connected.dup()
        self._socket.setblocking(False)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's, which Ray uses, is no subclass

    def data_received(self, data: bytes) -> None:
        self._received += data
        begin = 0
        while len(self._received) - begin >= HEADER.size:
            size, number, tag = HEADER.unpack_from(self._received, begin)
            end = begin + HEADER.size + size
            if len(self._received) < end:
                break
            self._handle(number, tag, bytes(self._received[begin + HEADER.size : end]))
            begin = end
        del self._received[:begin]

    def connection_lost(self, exc: Exception | None) -> None:
        if self._socket is not None:
            with suppress(OSError):
                while data := self._socket.recv(2**16):
                    self.data_received(data)
            self._socket.close()
        self._report_end()

    def send(self, number: int, tag: bytes, payload: bytes = b"") -> None:
        """Add a message to what `flush` sends."""
        self._to_send += HEADER.pack(len(payload), number, tag), payload

    def flush(self) -> None:
        assert self._transport is not None
        self._transport.write(b"".join(self._to_send))
        self._to_send.clear()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def _pack(argument: Any) -> tuple[str, Any]:
    if isinstance(argument, Sample):
        return "sample", _pack_sample(argument)
    if isinstance(argument, list) and argument and isinstance(argument[0], Sample):
        return "samples", [_pack_sample(one) for one in argument]
    return "value", argument


def _pack_sample(sample: Sample) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a sample's fields into plain ones and those that need torch (status as int, tensors as dtype and bytes)."""
    eager = {name: getattr(sample, name) for name in _EAGER}
    return eager, {name: _pack_lazy(getattr(sample, name)) for name in _LAZY}


def _pack_lazy(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value if value is None else int(value)
    return str(value.dtype).removeprefix("torch."), value.cpu().numpy().tobytes()
