"""The package's threads: call queues, calls in a thread of their own, and event loops.

All of them are daemons. Python cannot stop a thread, so one that hangs is left behind and ends with the process.
"""

from __future__ import annotations

import ast
import asyncio
import concurrent.futures
import queue
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

Value = TypeVar("Value")
CallResult = tuple[Any, BaseException | None]  # what a call returned, or what it raised

_END_SECONDS = 10.0  # for tasks to end when their loop is closed
_PARSER_LOCK = threading.RLock()
_FOREIGN = "<foreign text>"
warnings.filterwarnings("ignore", category=SyntaxWarning, module=_FOREIGN)  # its author does not read our stderr


def parse_python(text: str, mode: str = "exec") -> Any:
    """Parse as `ast.parse` does, one thread at a time.

    CPython 3.11 counts the depth of all threads' trees in one place: two that are built at once can raise SystemError
    ("AST constructor recursion depth mismatch").
    """
    with _PARSER_LOCK:
        return ast.parse(text, _FOREIGN, mode)


class CallTimeout(Exception):
    """A call missed its deadline. The function's own TimeoutError is another exception."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no answer within {seconds:g} s")


def start_thread(task: Callable[[], Any], name: str) -> threading.Thread:
    """Run ``task`` in a new daemon thread, which does not keep the process from ending."""
    thread = threading.Thread(target=task, name=name, daemon=True)
    thread.start()
    return thread


def begin_in_thread(function: Callable[[], Value], name: str) -> concurrent.futures.Future[Value]:
    """Call ``function`` in a new daemon thread; return the future of what it returns or raises."""
    done: concurrent.futures.Future[Value] = concurrent.futures.Future()

    def work() -> None:
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)

    start_thread(work, name)
    return done


class CallQueue:
    """One thread that runs its tasks in the order given. A task must handle its own errors."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Any], Callable[[Any], Any]] | None] = queue.SimpleQueue()
        self._thread = start_thread(self._work, f"coalign-{name}")

    @property
    def is_current(self) -> bool:
        """Whether the caller is a task of this queue."""
        return self._thread is threading.current_thread()

    def submit(self, task: Callable[[], Any], deliver: Callable[[Any], Any] = lambda result: None) -> None:
        """Run ``task`` after all earlier ones, and call ``deliver`` with what it returns."""
        self._tasks.put((task, deliver))

    def call(self, task: Callable[[], Value]) -> Value:
        """Run ``task`` after all earlier ones; return or raise what it does. Not for a task of this queue."""
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self.submit(partial(try_call, task), done.set_result)
        result, error = done.result()
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """End the thread after the tasks submitted so far."""
        self._tasks.put(None)

    def join(self, seconds: float) -> None:
        """Wait at most ``seconds`` until the thread has ended.

        A thread that is still freeing tensors while the interpreter goes away aborts the process.
        """
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _work(self) -> None:
        while (item := self._tasks.get()) is not None:
            task, deliver = item
            deliver(task())
            del item, task, deliver  # what they refer to can be freed while the thread waits


def try_call(function: Callable[[], Any]) -> CallResult:
    """Call a function; return what it returned, or what it raised."""
    try:
        return function(), None
    except BaseException as error:  # SystemExit too: a user's function cannot end the run by calling exit()
        return None, error


async def call_in_thread(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Call a plain function in a thread of its own; return or raise what it does.

    If the waiting task is cancelled, the thread goes on and its result is ignored.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if result.done():
            return  # cancelled
        if error is None:
            result.set_result(value)
        else:
            result.set_exception(RuntimeError("StopIteration") if isinstance(error, StopIteration) else error)

    def work() -> None:
        outcome = try_call(partial(function, *arguments, **keywords))
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, *outcome)

    start_thread(work, f"call:{getattr(function, '__name__', '')}")
    return await result


class EventLoopThread:
    """An asyncio event loop that runs in a thread until ``close``, so clients opened on it survive between calls."""

    def __init__(self, name: str) -> None:
        self.events = asyncio.new_event_loop()
        self._thread = start_thread(self._run, name)

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        """Start a coroutine on the loop, from any thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.events)

    def call_soon(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function on the loop, from any thread."""
        self.events.call_soon_threadsafe(function, *arguments)

    def is_blocked(self, seconds: float) -> bool:
        """Whether some coroutine keeps the loop from running anything else for ``seconds`` from now."""
        alive = threading.Event()
        self.call_soon(alive.set)
        return not alive.wait(seconds)

    def format_stack(self) -> str:
        """Where the loop's thread is at the moment, as a traceback's text."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame else ""

    def close(self) -> None:
        """Stop the loop. Tasks that still run are cancelled, and end within some seconds or are abandoned."""
        self.call_soon(self.events.stop)

    def _run(self) -> None:
        self.events.run_forever()
        if tasks := asyncio.all_tasks(self.events):
            for task in tasks:
                task.cancel()
            self.events.run_until_complete(asyncio.wait(tasks, timeout=_END_SECONDS))
        self.events.close()
