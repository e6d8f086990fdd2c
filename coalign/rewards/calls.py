"""Calls reward functions: many at once, each with a deadline and retries, and says exactly what went wrong.

A failure is never turned into a number. It does not know batches, models or where the samples come from.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from coalign.rewards.threads import OutOfTime, Settled, ThreadPool, TooManyHung
from coalign.types import Sample

_TASKS = 256  # calls at once of the async functions that do not say how many
_BACKOFF = 0.1  # seconds before the first retry, doubled for each further one, up to …
_LONGEST_PAUSE = 60.0  # … this, which is also as long as a service may ask us to wait


class RewardError(RuntimeError):
    """No sample could be scored, or too many calls never came back."""


class GiveUp(RuntimeError):
    """Raised by a function that would fail again: the call is not repeated."""


class TryLater(RuntimeError):
    """Raised by a function that knows how many seconds to wait before it is called again."""

    def __init__(self, message: str, seconds: float = 0.0) -> None:
        super().__init__(message)
        self.seconds = seconds


class RewardFailure(NamedTuple):
    """Why a sample has no value: ``raised``, ``timeout``, ``not_finite``, ``wrong_type`` or ``wrong_length``."""

    reason: str
    error: BaseException

    def __str__(self) -> str:
        return f"{self.reason}: {type(self.error).__name__}: {self.error}"


Outcome = dict[str, float] | RewardFailure  # {"reward": value, further entries for the log}


@dataclass(frozen=True)
class RewardFunction:
    """A reward function with its place in the run. Of a class one object is made, with ``arguments``, and called.

    ``takes`` is ``sample``, ``group`` or ``samples``: see coalign.rewards. ``timeout`` is in seconds, for one call.
    An async function may say by an attribute ``at_once`` how many calls of it are worth making at the same time.
    """

    name: str
    fn: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    timeout: float = 30.0
    retries: int = 2
    takes: str = field(init=False)
    waits: bool = field(init=False)
    at_once: int | None = field(init=False)

    def __post_init__(self) -> None:
        if inspect.isclass(self.fn):
            object.__setattr__(self, "fn", self.fn(**self.arguments))
            object.__setattr__(self, "arguments", {})
        first = next(iter(inspect.signature(self.fn).parameters.values()), None)
        if first is None or first.kind is first.KEYWORD_ONLY:
            raise TypeError(
                f"reward function '{self.name}' takes no positional argument; it needs one: sample, group or samples"
            )
        object.__setattr__(self, "takes", first.name if first.name in ("group", "samples") else "sample")
        object.__setattr__(self, "at_once", getattr(self.fn, "at_once", None))
        object.__setattr__(self, "waits", any(map(inspect.iscoroutinefunction, (self.fn, type(self.fn).__call__))))

    def call(self, argument: Any) -> Any:
        """The function's result, or an awaitable of it, for one unit."""
        return self.fn(argument, **self.arguments)

    def units(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """The samples of each call, in order."""
        if self.takes == "sample":
            return [[sample] for sample in samples]
        if self.takes == "samples":
            return [list(samples)] if samples else []
        return [list(group) for _, group in itertools.groupby(samples, key=lambda sample: sample.group)]


class Caller:
    """Scores samples with several functions concurrently, on an event loop in a thread of its own.

    The loop lives as long as the Caller, so an async function may keep its client open between calls.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._threads, self._tasks = ThreadPool(), asyncio.Semaphore(_TASKS)
        self._random = random.Random()  # its own: the person's `random.seed` stays as it is
        threading.Thread(target=self._run, name="rewards", daemon=True).start()

    def score(self, functions: Sequence[RewardFunction], samples: Sequence[Sample]) -> list[list[Outcome]]:
        """For each function the outcome of every sample, in order. Raises RewardError if too many threads hang."""
        future = asyncio.run_coroutine_threadsafe(self._score(functions, samples), self._loop)
        patience = max((function.timeout for function in functions), default=0.0)
        while not wait([future], timeout=patience).done:
            self._check_loop(functions, patience)
        return future.result()

    def close(self) -> None:
        """Stop the loop. Calls that still run are left to themselves."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def _check_loop(self, functions: Sequence[RewardFunction], patience: float) -> None:
        """An async function that blocks holds up the loop, the deadlines included: nobody else could tell."""
        alive = threading.Event()
        self._loop.call_soon_threadsafe(alive.set)
        if not alive.wait(patience):
            names = ", ".join(f"'{function.name}'" for function in functions if function.waits)
            raise RewardError(
                f"an async reward function ({names}) has blocked its event loop for {patience:g} s: it must await "
                "whatever takes time (an async HTTP client, asyncio.sleep, asyncio.to_thread), or be a plain `def`"
            )

    async def _score(self, functions: Sequence[RewardFunction], samples: Sequence[Sample]) -> list[list[Outcome]]:
        try:
            async with asyncio.TaskGroup() as running:
                tasks = [running.create_task(self._persist(function, samples)) for function in functions]
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _persist(self, function: RewardFunction, samples: Sequence[Sample]) -> list[Outcome]:
        """Repeat the calls that failed until none does or the retries are used up; the last attempt counts."""
        units = function.units(samples)
        outcomes = await self._attempt(function, units)
        for attempt in range(function.retries):
            repeat = [i for i, unit in enumerate(outcomes) if any(map(_worth_repeating, unit))]
            if not repeat:
                break
            await asyncio.sleep(self._pause(attempt, [one for i in repeat for one in outcomes[i]]))
            for i, unit in zip(repeat, await self._attempt(function, [units[i] for i in repeat]), strict=True):
                outcomes[i] = unit
        return list(itertools.chain.from_iterable(outcomes))

    def _pause(self, attempt: int, outcomes: Sequence[Outcome]) -> float:
        """Seconds before the next attempt: as long as was asked for, at least a backoff whose random part keeps the
        workers of a run from coming back all at once."""
        errors = [outcome.error for outcome in outcomes if isinstance(outcome, RewardFailure)]
        asked = max((error.seconds for error in errors if isinstance(error, TryLater)), default=0.0)
        return min(max(asked, _BACKOFF * 2**attempt) * self._random.uniform(1.0, 1.5), _LONGEST_PAUSE)

    async def _attempt(self, function: RewardFunction, units: list[list[Sample]]) -> list[list[Outcome]]:
        arguments = [unit[0] for unit in units] if function.takes == "sample" else units
        if function.waits:
            free = asyncio.Semaphore(function.at_once) if function.at_once else self._tasks
            settled = await asyncio.gather(*(self._await(function, argument, free) for argument in arguments))
        else:
            settled = await self._in_threads(function, arguments)
        return [_outcomes(function, *one, len(unit)) for one, unit in zip(settled, units, strict=True)]

    async def _await(self, function: RewardFunction, argument: Any, free: asyncio.Semaphore) -> Settled:
        async with free:
            task = asyncio.ensure_future(_settled(function.call, argument))
            done, _ = await asyncio.wait({task}, timeout=function.timeout)
        if done:
            return task.result()
        task.cancel()
        return None, OutOfTime(function.timeout)

    async def _in_threads(self, function: RewardFunction, arguments: Sequence[Any]) -> list[Settled]:
        try:
            return await self._threads.run(function.call, arguments, function.timeout)
        except* TooManyHung as hung:
            raise RewardError(
                f"{hung.exceptions[0]}, the last one in '{function.name}' (timeout {function.timeout:g} s). Threads "
                "cannot be stopped: raise the timeout, make the function `async def`, or let it work in a subprocess "
                "with a time limit of its own."
            ) from None


async def _settled(call: Callable[[Any], Any], argument: Any) -> Settled:
    try:
        return await call(argument), None
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return None, error


def _worth_repeating(outcome: Outcome) -> bool:
    return isinstance(outcome, RewardFailure) and not isinstance(outcome.error, GiveUp)


def _outcomes(function: RewardFunction, returned: Any, error: BaseException | None, expected: int) -> list[Outcome]:
    if error is not None:
        return [RewardFailure("timeout" if isinstance(error, OutOfTime) else "raised", error)] * expected
    return read_outcomes(function, returned, expected)


def read_outcomes(function: RewardFunction, returned: Any, expected: int) -> list[Outcome]:
    """What a call returned, as one outcome for each of its ``expected`` samples."""
    if function.takes == "sample":
        return [_outcome(returned)]
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(values, (list, tuple)):
        error = TypeError(f"returned {_shown(returned)} for {expected} samples; expected a list of {expected} numbers")
        return [RewardFailure("wrong_type", error)] * expected
    if len(values) != expected:
        error = ValueError(f"returned {len(values)} values for {expected} samples")
        return [RewardFailure("wrong_length", error)] * expected
    return [_outcome(value) for value in values]


def _outcome(value: Any) -> Outcome:
    entries = dict(value) if isinstance(value, Mapping) else {"reward": value}
    if "reward" not in entries:
        return RewardFailure("wrong_type", TypeError(f"returned a dict without the key 'reward': {_shown(value)}"))
    for name, entry in entries.items():
        if not hasattr(entry, "__float__") or getattr(entry, "ndim", 0):
            return RewardFailure("wrong_type", TypeError(f"returned {_shown(entry)}{_of(name)}; expected a number"))
        entries[name] = float(entry)
        if not math.isfinite(entries[name]):
            return RewardFailure(
                "not_finite", ValueError(f"returned {entries[name]}{_of(name)}; expected a finite number")
            )
    return entries


def _of(name: str) -> str:
    return "" if name == "reward" else f" for '{name}'"


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.80}" if value is not None else "None"
