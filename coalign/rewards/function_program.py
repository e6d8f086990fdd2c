"""The program of a process that runs one reward function of a person's. `function_process.py` is the parent's end.

It imports nothing of Coalign, so that it starts in a fraction of a second and stays small. Messages in both directions
are pickles behind their length. First comes (import path, function, is_async), then calls (number, argument), where the
argument None cancels one. An answer is (number, kind, pickle), where kind is `ready`, `value`, `error`, `cancelled`,
`slow` (a call begins an import, which is no work of the function) or `fast` (it has ended).
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_PR_SET_PDEATHSIG = 1
_SAMPLE = "coalign.types"


class SampleView:
    """A sample in a process without torch, which it imports when the function reads a tensor or the status."""

    def __init__(self, connection: Connection, fields: dict[str, Any], lazy: dict[str, Any]) -> None:
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


class Connection:
    """The program's end of the socket."""

    def __init__(self, descriptor: int) -> None:
        self._stream = socket.socket(fileno=descriptor).makefile("rwb")
        self._lock = threading.Lock()

    def receive(self) -> Any:
        """The next message; ends the process once the parent has gone."""
        header = self._stream.read(4)
        if len(header) < 4:
            os._exit(0)  # whatever threads the function has started
        return pickle.loads(self._stream.read(struct.unpack("!I", header)[0]))

    def send(self, number: int, kind: str, value: Any = None) -> None:
        message = pickle.dumps((number, kind, value if isinstance(value, bytes) else pickle.dumps(value)))
        with self._lock:
            self._stream.write(struct.pack("!I", len(message)) + message)
            self._stream.flush()

    @contextmanager
    def import_time(self) -> Iterator[None]:
        """Stop the clock of deadlines within, if torch is still to be imported."""
        slow = _SAMPLE not in sys.modules or "torch" not in sys.modules
        if slow:
            self.send(0, "slow")
        yield
        if slow:
            self.send(0, "fast")

    def settle(self, number: int, returned: Any, error: BaseException | None) -> None:
        """Send what a call returned or raised."""
        if error is None:
            try:
                self.send(number, "value", pickle.dumps(returned))
                return
            except Exception as problem:
                error = problem
        self.send(number, "error", _pack_error(error))


def _pack_error(error: BaseException) -> bytes:
    """(error, traceback). An exception that does not survive the journey becomes a RuntimeError that quotes it."""
    trace = "".join(traceback.format_exception(error)).rstrip()
    try:
        packed = pickle.dumps((error, trace))
        pickle.loads(packed)
        return packed
    except Exception:
        return pickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), trace))


def _unpack_samples(connection: Connection, packed: Any) -> Any:
    if isinstance(packed, list):
        return [_unpack_samples(connection, one) for one in packed]
    fields, lazy = packed
    if _SAMPLE in sys.modules:  # the function's module has imported it, so the class itself costs nothing
        return sys.modules[_SAMPLE].Sample(**fields, **{name: _unpack(value) for name, value in lazy.items()})
    return SampleView(connection, fields, lazy)


def _bind_to_parent() -> None:
    """End with the parent, and be what the system kills first when memory is short."""
    with suppress(OSError, AttributeError):  # other systems than Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")


def _load(function: bytes) -> tuple[Any, dict[str, Any]]:
    """The function and its arguments; of a class the instance, which has them."""
    fn, arguments = pickle.loads(function)
    return (fn(**arguments), {}) if inspect.isclass(fn) else (fn, arguments)


def main() -> None:
    _bind_to_parent()
    connection = Connection(int(sys.argv[1]))
    path, function, is_async = connection.receive()
    sys.path[:] = path
    try:
        fn, arguments = _load(function)
    except BaseException as error:
        connection.settle(0, None, error)
        return
    connection.send(0, "ready", getattr(fn, "at_once", None))
    if is_async:
        asyncio.run(_serve_async(connection, fn, arguments))
    while True:
        number, argument = connection.receive()
        try:
            returned, error = fn(_unpack_samples(connection, argument), **arguments), None
        except BaseException as raised:  # SystemExit too: a function cannot end its process by calling exit()
            returned, error = None, raised
        connection.settle(number, returned, error)


async def _serve_async(connection: Connection, fn: Any, arguments: dict[str, Any]) -> None:
    loop, tasks = asyncio.get_running_loop(), {}

    async def run(number: int, argument: Any) -> None:
        try:
            returned, error = await fn(_unpack_samples(connection, argument), **arguments), None
        except BaseException as raised:
            returned, error = None, raised
        tasks.pop(number, None)
        connection.settle(number, returned, error)

    def handle(number: int, argument: Any) -> None:
        if argument is not None:
            tasks[number] = loop.create_task(run(number, argument))
            return
        if number in tasks:
            tasks[number].cancel()
        connection.send(number, "cancelled")  # at once: the parent learns that the event loop is not blocked

    def read() -> None:
        while True:
            loop.call_soon_threadsafe(handle, *connection.receive())

    threading.Thread(target=read, daemon=True).start()
    await loop.create_future()


if __name__ == "__main__":
    main()
