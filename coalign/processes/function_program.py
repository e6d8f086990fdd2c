"""The program of a process that runs one function that a person wrote. `function_process.py` is the parent's end.

It imports nothing of Coalign, so that it starts in a fraction of a second and stays small. A message in either
direction is HEADER (size, number, tag) and a payload, mostly a pickle. First comes START with (import path, function,
is_async, memory_mb), then CALLs with their packed arguments, in any number; a CANCEL ends one. The answer to each is
VALUE with (value, states of random generators among the arguments), or ERROR; READY has the function's `at_once`. SLOW
says that a call begins an import, which is no work of the function, FAST that it has ended. A plain function's calls
are made and answered one by one, in order, so that the parent knows which one is under way.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import pickle
import random
import resource
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

HEADER = struct.Struct("!IQc")
START, CALL, CANCEL, READY, VALUE, ERROR, CANCELLED, SLOW, FAST = (bytes([code]) for code in range(9))

_PR_SET_PDEATHSIG = 1
_SAMPLE = "coalign.types"


class _SampleView:
    """A sample in a process without torch, which it imports when the function reads a tensor or the status."""

    def __init__(self, connection: _ParentConnection, fields: dict[str, Any], lazy: dict[str, Any]) -> None:
        self.__dict__.update(fields, _lazy=lazy, _connection=connection)

    def __getattr__(self, name: str) -> Any:
        lazy = self.__dict__.get("_lazy", {})
        if name not in lazy:
            raise AttributeError(f"a sample has no '{name}'")
        with self._connection.import_time():
            self.__dict__[name] = _unpack(lazy[name])
        return self.__dict__[name]


def _unpack(packed: Any) -> Any:
    """The status (an int) or the tensor (the name of its dtype, and its bytes) that was packed; None for None."""
    if packed is None:
        return None
    if isinstance(packed, int):
        from coalign.types import Status

        return Status(packed)
    import torch

    dtype, data = getattr(torch, packed[0]), packed[1]
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


class _ParentConnection:
    """The program's end of the socket."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._stream = self._socket.makefile("rb", buffering=2**16)
        self._lock = threading.Lock()

    def receive(self) -> tuple[int, bytes, bytes]:
        """The next message: number, tag, payload. Ends the process once the parent has gone."""
        header = self._stream.read(HEADER.size)
        if len(header) < HEADER.size:
            os._exit(0)  # whatever threads the function has started
        size, number, tag = HEADER.unpack(header)
        return number, tag, self._stream.read(size)

    def send(self, number: int, tag: bytes, payload: bytes = b"") -> None:
        with self._lock:
            self._socket.sendall(HEADER.pack(len(payload), number, tag) + payload)

    @contextmanager
    def import_time(self) -> Iterator[None]:
        """Stop the clock of deadlines within, if torch is still to be imported."""
        slow = _SAMPLE not in sys.modules or "torch" not in sys.modules
        if slow:
            self.send(0, SLOW)
        yield
        if slow:
            self.send(0, FAST)


class _IsolatedFunction:
    """The function, the arguments that its configuration binds, and the limit of its memory."""

    def __init__(self, connection: _ParentConnection, pickled: bytes, memory_mb: int | None) -> None:
        self._connection, self._memory_mb = connection, memory_mb
        if memory_mb is not None:
            # Not RLIMIT_AS: torch and CUDA reserve far more addresses than they use.
            resource.setrlimit(resource.RLIMIT_DATA, (memory_mb << 20, memory_mb << 20))
        fn, arguments = pickle.loads(pickled)
        self.fn: Any
        self.fn, self._bound = (fn(**arguments), {}) if inspect.isclass(fn) else (fn, arguments)

    def answer(self, number: int, payload: bytes) -> None:
        """Make a call of a plain function and send its value or error."""
        try:
            arguments = self.unpack(payload)
            self.send_value(number, self.fn(*arguments, **self._bound), arguments)
        except BaseException as error:  # SystemExit too: a function cannot end its process by calling exit()
            self.send_error(number, error)

    async def answer_async(self, number: int, payload: bytes) -> None:
        try:
            arguments = self.unpack(payload)
            self.send_value(number, await self.fn(*arguments, **self._bound), arguments)
        except BaseException as error:
            self.send_error(number, error)

    def unpack(self, payload: bytes) -> list[Any]:
        return [_unpack_argument(self._connection, one) for one in pickle.loads(payload)]

    def send_value(self, number: int, value: Any, arguments: list[Any]) -> None:
        states = [one.getstate() for one in arguments if isinstance(one, random.Random)]
        self._connection.send(number, VALUE, pickle.dumps((value, states)))

    def send_error(self, number: int, error: BaseException) -> None:
        self._connection.send(number, ERROR, _pack_error(error, self._memory_mb))


def _pack_error(error: BaseException, memory_mb: int | None) -> bytes:
    """(error, traceback). An exception that does not survive the journey becomes a RuntimeError that quotes it."""
    if isinstance(error, MemoryError):
        traceback.clear_frames(error.__traceback__)  # their variables are the memory that the next lines need
    trace = "".join(traceback.format_exception(error)).rstrip()
    if isinstance(error, MemoryError) and memory_mb is not None:
        error = MemoryError(f"the function needs more memory than process_memory_mb allows: {memory_mb} MB")
    try:
        packed = pickle.dumps((error, trace))
        pickle.loads(packed)
        return packed
    except Exception:
        return pickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), trace))


def _unpack_argument(connection: _ParentConnection, packed: tuple[str, Any]) -> Any:
    tag, value = packed
    if tag == "samples":
        return [_unpack_argument(connection, ("sample", one)) for one in value]
    if tag != "sample":
        return value
    fields, lazy = value
    if _SAMPLE in sys.modules:  # the function's module has imported it, so the class itself costs nothing
        return sys.modules[_SAMPLE].Sample(**fields, **{name: _unpack(value) for name, value in lazy.items()})
    return _SampleView(connection, fields, lazy)


def _bind_to_parent() -> None:
    """Let this process end with its parent, and be killed first when memory is short."""
    with suppress(OSError, AttributeError):  # other systems than Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")


def main() -> None:
    _bind_to_parent()
    connection = _ParentConnection(int(sys.argv[1]))
    _, _, payload = connection.receive()
    sys.path[:], pickled, is_async, memory_mb = pickle.loads(payload)
    try:
        function = _IsolatedFunction(connection, pickled, memory_mb)
    except BaseException as error:
        connection.send(0, ERROR, _pack_error(error, memory_mb))
        return
    connection.send(0, READY, pickle.dumps(getattr(function.fn, "at_once", None)))
    if is_async:
        asyncio.run(_serve_async(connection, function))
    while True:
        number, _, payload = connection.receive()
        function.answer(number, payload)


async def _serve_async(connection: _ParentConnection, function: _IsolatedFunction) -> None:
    loop, tasks = asyncio.get_running_loop(), {}

    def handle(number: int, tag: bytes, payload: bytes) -> None:
        if tag == CALL:
            tasks[number] = loop.create_task(function.answer_async(number, payload))
            tasks[number].add_done_callback(lambda _: tasks.pop(number, None))
            return
        if number in tasks:
            tasks[number].cancel()
        connection.send(number, CANCELLED)  # at once: the parent learns that the event loop is not blocked

    def read() -> None:
        while True:
            loop.call_soon_threadsafe(handle, *connection.receive())

    threading.Thread(target=read, daemon=True).start()
    await loop.create_future()


if __name__ == "__main__":
    main()
