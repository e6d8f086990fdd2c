"""Runs environments as coroutines on an event loop in its own thread, while the policy computes in another thread."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import groupby
from typing import Any

from coalign.config.errors import suggest
from coalign.config.schema import RunConfig
from coalign.data.examples import MARKS
from coalign.environments.episode import EnvironmentClock, Episode, OutOfTokens
from coalign.interpreter_watch import InterpreterWatch
from coalign.processes.function_process import close_pools, is_coroutine_function
from coalign.threads import EventLoopThread
from coalign.types import ENVIRONMENT_KEY, Status

_GRACE = 10.0  # seconds after an environment's timeout at which its event loop counts as blocked
_MIN_HOLD_SECONDS = 30.0  # for which the interpreter may be held while an environment runs
_IDLE_HOLD_SECONDS = 600.0  # between batches, while models load or save


class EnvironmentBlocked(RuntimeError):
    """An environment blocks the event loop."""


@dataclass(frozen=True)
class EnvironmentFunction:
    """A coroutine function of one ``episode`` or of a ``group``, its configuration, and its ``timeout`` in seconds.

    ``key`` is its name in `rollout.environments`, empty for the only environment of a run.
    """

    fn: Callable[..., Coroutine[Any, Any, Any]]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 300.0
    key: str = ""

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
        return self.key or getattr(self.fn, "__name__", type(self.fn).__name__)

    def check(self, samples: Mapping[str, int]) -> None:
        """Let the function refuse (ValueError) its arguments, or the number of samples of a prompt.

        Calls the function's attribute ``check``, if there is one, as ``check(samples, **arguments)``. ``samples`` maps
        the configuration keys of those numbers to their values.
        """
        if hasattr(self.fn, "check"):
            self.fn.check(samples, **self.arguments)


Environments = Mapping[str, EnvironmentFunction]  # by their keys


def choose_environment(environments: Environments, row: Mapping[str, Any]) -> EnvironmentFunction:
    """Return the environment that a row of data names, or the only one. ValueError if it names none of several."""
    if "" in environments:
        return environments[""]
    name = row.get(ENVIRONMENT_KEY)
    if not isinstance(name, str) or name not in environments:
        source, number = (row.get(mark, "?") for mark in MARKS[:2])
        problem = "no environment" if name is None else f"the environment {name!r}"
        raise ValueError(
            f"row {number} of {source} names {problem}, and rollout.environments has {', '.join(environments)}: set "
            f"`{ENVIRONMENT_KEY}` in the row or its source{suggest(str(name), environments) if name else ''}"
        )
    return environments[name]


@dataclass(eq=False)
class EnvironmentCall:
    """One call of an environment, and how it failed."""

    environment: EnvironmentFunction
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
            self._watch = InterpreterWatch(f"environment {batch.names}", self._find_limit)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self.call_soon(close_pools, self.events)
        super().close()

    def _find_limit(self) -> float:
        """Return for how many seconds the interpreter may be held."""
        batches = self._batches
        running = [batch for batch in batches if not batch.done]
        longest = max(batch.timeout for batch in running or batches)
        return max(longest + _GRACE, _MIN_HOLD_SECONDS if running else _IDLE_HOLD_SECONDS)


class EnvironmentBatch:
    """The episodes of one batch, whose environments are started at once. A loop may run several batches.

    Once ``min_groups`` groups are done, the episodes of the others end as PARTIAL: of several environments each one's,
    once it has its share of ``min_groups``.
    """

    def __init__(
        self,
        loop: EnvironmentLoop,
        environments: Environments,
        episodes: Sequence[Episode],
        min_groups: int | None = None,
    ) -> None:
        self.loop = loop
        self.timeout = max(environment.timeout for environment in environments.values())
        self.names = ", ".join(f"'{environment.name}'" for environment in environments.values())
        self.calls: list[EnvironmentCall] = []
        for _, samples in groupby(episodes, key=lambda episode: episode.group):
            group = list(samples)
            environment = choose_environment(environments, group[0].row)
            split = [group] if environment.grouped else [[episode] for episode in group]
            self.calls += [self._call(environment, episodes) for episodes in split]
        self._left = {key: Counter[int]() for key in environments}  # calls of each group that are not done
        for call in self.calls:
            self._left[call.environment.key][call.group] += 1
        groups = sum(map(len, self._left.values()))
        self._min_share = None if min_groups is None else Fraction(min_groups, max(1, groups))  # for each environment
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
        loop, limit = self.loop, self.timeout + _GRACE
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
                f"an environment has blocked its event loop for {self.timeout:g} s: it must await whatever "
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

    def _call(self, environment: EnvironmentFunction, episodes: list[Episode]) -> EnvironmentCall:
        clock = EnvironmentClock(environment.timeout, lambda: self._expire(call))
        call = EnvironmentCall(environment, episodes, clock)
        for episode in episodes:
            episode.clock = call.clock
        return call

    async def _run(self, call: EnvironmentCall) -> None:
        call.clock.start()
        environment = call.environment
        try:
            argument = call.episodes if environment.grouped else call.episodes[0]
            await environment.fn(argument, **environment.arguments)
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
        seconds = call.environment.timeout
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
        self._left[call.environment.key][call.group] -= status != Status.PARTIAL
        if task is not asyncio.current_task():
            task.cancel()

    def _check(self) -> None:
        for key, left in self._left.items():
            complete = sum(not calls for calls in left.values())
            if self._min_share is not None and complete >= self._min_share * len(left):
                self._cut(key)
        self.done = not self._tasks
        self.loop.news.set()

    def _cut(self, key: str | None = None) -> None:
        """End the episodes that are under way, of all environments or of one."""
        for call in list(self._tasks):
            if key in (None, call.environment.key):
                self._settle(call, Status.PARTIAL)
        self.done = not self._tasks
        self.loop.news.set()


def check_environments(environments: Environments, config: RunConfig) -> None:
    """Refuse wrong arguments of environments, and a number of samples per prompt that one cannot play."""
    keys = ["samples_per_prompt", *(["eval_samples"] if config.data.eval else [])]
    for environment in environments.values():
        environment.check({f"runtime.{key}": getattr(config.runtime, key) for key in keys})
    spread = [name for name, model in config.models.items() if model.spread_samples]
    grouped = [environment.name for environment in environments.values() if environment.grouped]
    if grouped and spread:
        raise ValueError(
            f"models.{spread[0]}.spread_samples: `{grouped[0]}` plays the samples of a prompt together, so "
            "they have to be on one replica; leave it out"
        )
