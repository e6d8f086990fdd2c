"""Runs environments as coroutines on an event loop in its own thread, while the policy computes in another thread."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from coalign.config.schema import RunConfig
from coalign.environments.episode import EnvironmentClock, Episode, OutOfTokens
from coalign.interpreter_watch import InterpreterWatch
from coalign.processes.function_process import close_pools, is_coroutine_function
from coalign.threads import EventLoopThread
from coalign.types import Status

_GRACE = 10.0  # seconds after an environment's timeout at which its event loop counts as blocked
_MIN_HOLD_SECONDS = 30.0  # for which the interpreter may be held while an environment runs
_IDLE_HOLD_SECONDS = 600.0  # between batches, while models load or save


class EnvironmentBlocked(RuntimeError):
    """An environment blocks the event loop."""


@dataclass(frozen=True)
class EnvironmentFunction:
    """A coroutine function of one ``episode`` or of a ``group``, its configuration, and its ``timeout`` in seconds."""

    fn: Callable[..., Coroutine[Any, Any, Any]]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 300.0

    def __post_init__(self) -> None:
        name = self.name
        if not is_coroutine_function(self.fn):
            raise TypeError(f"environment '{name}' is no coroutine: write it as `async def {name}(episode, *, …)`")
        first = next(iter(inspect.signature(self.fn).parameters.values()), None)
        if first is None or first.kind is first.KEYWORD_ONLY:
            raise TypeError(f"environment '{name}' takes no positional argument; it needs one: episode or group")
        object.__setattr__(self, "grouped", first.name == "group")

    grouped: bool = field(init=False)

    @property
    def name(self) -> str:
        return getattr(self.fn, "__name__", type(self.fn).__name__)

    def check(self, samples: Mapping[str, int]) -> None:
        """Let the function refuse (ValueError) its arguments, or the number of samples of a prompt.

        Calls the function's attribute ``check``, if there is one, as ``check(samples, **arguments)``. ``samples`` maps
        the configuration keys of those numbers to their values.
        """
        if hasattr(self.fn, "check"):
            self.fn.check(samples, **self.arguments)

    def split(self, episodes: Sequence[Episode]) -> list[list[Episode]]:
        """Split the episodes into those of each call."""
        if self.grouped:
            return [list(some) for _, some in groupby(episodes, key=lambda episode: episode.group)]
        return [[episode] for episode in episodes]


@dataclass(eq=False)
class EnvironmentCall:
    """One call of an environment, and how it failed."""

    episodes: list[Episode]
    clock: EnvironmentClock
    over: bool = False
    error: BaseException | None = None
    reason: str = ""

    @property
    def group(self) -> int:
        return self.episodes[0].group


class EnvironmentLoop(EventLoopThread):
    """An event loop that lives as long as its owner, so environments may keep clients open between batches.

    Whoever holds the interpreter for longer than the environment's timeout ends the process: see InterpreterWatch.
    """

    def __init__(self) -> None:
        super().__init__("environments")
        self.news = threading.Event()  # an environment has ended, or asks for a turn
        self.silence = 0.0  # seconds for which the policy's thread has waited since the last news
        self._watch: InterpreterWatch | None = None
        self._batches: list[EnvironmentBatch] = []  # the running ones, and the last one

    def watch(self, batch: EnvironmentBatch) -> None:
        """Start to watch the interpreter, if it is not watched yet, for a ``batch`` that begins."""
        self._batches = [*(earlier for earlier in self._batches if not earlier.done), batch]
        if self._watch is None:
            self._watch = InterpreterWatch(f"environment '{batch.environment.name}'", self._find_limit)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self.call_soon(close_pools, self.events)
        super().close()

    def _find_limit(self) -> float:
        """Return for how many seconds the interpreter may be held."""
        batches = self._batches
        running = [batch for batch in batches if not batch.done]
        longest = max(batch.environment.timeout for batch in running or batches)
        return max(longest + _GRACE, _MIN_HOLD_SECONDS if running else _IDLE_HOLD_SECONDS)


class EnvironmentBatch:
    """The environments of one batch, started at once. A loop may run several batches.

    Once ``min_groups`` groups are done, the episodes of the others end as PARTIAL.
    """

    def __init__(
        self,
        loop: EnvironmentLoop,
        environment: EnvironmentFunction,
        episodes: Sequence[Episode],
        min_groups: int | None = None,
    ) -> None:
        self.loop = loop
        self.environment = environment
        self.calls = [self._call(episodes) for episodes in environment.split(episodes)]
        self._min_groups = min_groups
        self._left = Counter(call.group for call in self.calls)  # calls of each group that are not done
        self._tasks: dict[EnvironmentCall, asyncio.Task[None]] = {}  # those under way
        self.done = not self.calls
        loop.watch(self)
        loop.events.call_soon_threadsafe(self._begin)

    # ---- for the policy's thread -------------------------------------------------------------------------------------

    @property
    def finished(self) -> int:
        """The number of episodes that have ended."""
        return sum(len(call.episodes) for call in self.calls if call.over)

    def wait(self, seconds: float = math.inf) -> None:
        """Wait for news of any batch of the loop, at most ``seconds``.

        Raises EnvironmentBlocked if an environment blocks the loop, and with it all timeouts.
        """
        loop, limit = self.loop, self.environment.timeout + _GRACE
        while seconds > 0:
            patience = max(0.0, min(seconds, limit - loop.silence))
            if loop.news.wait(patience):
                loop.news.clear()
                loop.silence = 0.0
                return
            loop.silence, seconds = loop.silence + patience, seconds - patience
            if loop.silence >= limit:
                self._check_responsive()

    def _check_responsive(self) -> None:
        self.loop.silence = 0.0
        if self.loop.is_blocked(_GRACE):  # otherwise all environments wait for a service
            raise EnvironmentBlocked(
                f"an environment has blocked its event loop for {self.environment.timeout:g} s: it must await whatever "
                "takes time (coalign.threads.call_in_thread for plain functions). It is here:\n"
                + self.loop.format_stack()
            )

    def stop(self) -> None:
        """End the remaining episodes (PARTIAL) once the policy computes nothing any more."""
        self.loop.call_soon(self._cut)

    # ---- on the event loop -------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        for call in self.calls:
            self._tasks[call] = self.loop.events.create_task(self._run(call))
        self._check()

    def _call(self, episodes: list[Episode]) -> EnvironmentCall:
        call = EnvironmentCall(episodes, EnvironmentClock(self.environment.timeout, lambda: self._expire(call)))
        for episode in episodes:
            episode.clock = call.clock
        return call

    async def _run(self, call: EnvironmentCall) -> None:
        call.clock.start()
        try:
            argument = call.episodes if self.environment.grouped else call.episodes[0]
            await self.environment.fn(argument, **self.environment.arguments)
        except asyncio.CancelledError as error:
            if call in self._tasks:  # the environment cancelled itself
                call.reason, call.error = "cancelled", error
        except OutOfTokens:
            pass  # the episodes keep their turns so far
        except (Exception, SystemExit) as error:
            call.reason, call.error = type(error).__name__, error
        self._settle(call, Status.ERROR if call.error else None)
        self._check()

    def _expire(self, call: EnvironmentCall) -> None:
        seconds = self.environment.timeout
        call.reason = "timeout"
        call.error = TimeoutError(f"the environment took more than {seconds:g} s beside the policy's turns")
        self._settle(call, Status.ERROR)
        self._check()

    def _settle(self, call: EnvironmentCall, status: Status | None) -> None:
        """End the call, and cancel its task."""
        task = self._tasks.pop(call, None)
        if task is None:
            return
        call.over = True
        call.clock.end()
        for episode in call.episodes:
            episode.close(status)
        self._left[call.group] -= status != Status.PARTIAL
        if task is not asyncio.current_task():
            task.cancel()

    def _check(self) -> None:
        complete = sum(not left for left in self._left.values())
        if self._min_groups is not None and complete >= self._min_groups:
            self._cut()
        self.done = not self._tasks
        self.loop.news.set()

    def _cut(self) -> None:
        for call in list(self._tasks):
            self._settle(call, Status.PARTIAL)
        self.done = True
        self.loop.news.set()


def check_environment(environment: EnvironmentFunction, config: RunConfig) -> None:
    """Refuse wrong arguments of an environment, and a number of samples per prompt that it cannot play."""
    keys = ["samples_per_prompt", *(["eval_samples"] if config.data.eval else [])]
    environment.check({f"runtime.{key}": getattr(config.runtime, key) for key in keys})
    spread = [name for name, model in config.models.items() if model.spread_samples]
    if environment.grouped and spread:
        raise ValueError(
            f"models.{spread[0]}.spread_samples: `{config.rollout.fn}` plays the samples of a prompt together, so "
            "they have to be on one replica; leave it out"
        )
