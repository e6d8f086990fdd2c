"""Calls reward functions concurrently, with a deadline for each call, retries, and a reason for every failure.

A failure never becomes a number. This module knows nothing of batches, models or where samples come from.
``NestedFunction`` is a function that another reward's configuration names, such as what a tournament compares by.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import math
import reprlib
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator

from coalign.config.functions import bind, find_own_frame, list_columns, resolve
from coalign.config.schema import Function
from coalign.processes.function_process import FunctionPool, ProcessDied, build_pool, close_pools, is_coroutine_function
from coalign.rewards.thread_pool import ThreadPool, TooManyHung
from coalign.services import PATIENCE, ServiceError, draw_pause
from coalign.threads import CallResult, CallTimeout, EventLoopThread
from coalign.types import SOURCE_KEY, Sample

log = logging.getLogger(__name__)

# The first parameter of other libraries' reward functions.
FOREIGN = {
    "completions": "TRL",
    "prompts": "TRL",
    "data_source": "verl",
    "solution_str": "verl",
    "queries": "OpenRLHF",
    "args": "slime",
}
_MAX_CALLS = 256  # concurrent calls of async functions that do not set `at_once`


class RewardError(RuntimeError):
    """No sample could be scored, or too many calls never returned."""


class RewardBug(RewardError):
    """A person's function is wrong on most samples; the text names its line."""


class GiveUp(RuntimeError):
    """A reward function raises this to say that a retry would fail too: the call is not repeated.

    So does any error with the attribute ``gives_up``. In a list of values it stands for that of one sample.
    """

    gives_up = True


# Errors that the same call raises again: a name, a key or a type that is wrong.
CODE_ERRORS = (AttributeError, ImportError, LookupError, NameError, TypeError, ZeroDivisionError)
BUGS = ("bug", "wrong_type", "wrong_length")


class RewardFailure(NamedTuple):
    """Why a sample has no value: ``raised``, ``timeout``, ``died``, ``service``, ``not_finite``, or one of BUGS: the
    function itself is wrong, so no call is repeated."""

    reason: str
    error: BaseException

    def __str__(self) -> str:
        frame = find_own_frame("".join(traceback.format_exception(self.error)))
        location = f" ({frame.place})" if frame else ""
        return f"{self.reason}: {type(self.error).__name__}: {self.error}{location}"


# {"reward": a finite value, further entries for the log: NaN for one that is no number}
RewardOutcome = dict[str, float] | RewardFailure


def find_argument(name: str, fn: Callable[..., Any]) -> Literal["sample", "group", "samples"]:
    """Say what a reward function, object or class takes, from its signature. Raises ValueError for any other one."""
    is_class = inspect.isclass(fn)
    parameters = [*inspect.signature(fn.__call__ if is_class else fn).parameters.values()][is_class:]
    first = next(iter(parameters), None)
    if first is None or first.kind is first.KEYWORD_ONLY:
        raise ValueError(
            f"reward function '{name}' takes no positional argument; it needs one: sample, group or samples"
        )
    positional = (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD)
    needed = [p.name for p in parameters if p.kind in positional and p.default is p.empty]
    if len(needed) > 1 or first.name in FOREIGN:
        library = FOREIGN.get(first.name)
        whose = f", as in {library}; docs/writing_a_reward.md shows how to wrap it" if library else ""
        raise ValueError(
            f"reward function '{name}' takes {', '.join(needed)}{whose}. Coalign calls it with one argument: "
            "`def f(sample, *, …)`, with sample.response, sample.prompt, and the row in sample.meta"
        )
    return first.name if first.name in ("group", "samples") else "sample"


@dataclass(frozen=True)
class RewardFunction:
    """A reward function with its name, weight and limits. A class is instantiated once, with ``arguments``.

    ``takes`` is ``sample``, ``group`` or ``samples``: see coalign.rewards. ``timeout`` is in seconds, for one call.
    ``patience``: seconds for which calls are repeated while a service fails. An async function's attribute ``at_once``,
    if it has one, is how many of its calls may run concurrently; the attribute ``is_service`` says that a timeout is
    the failure of a service. ``pool``: the processes that it runs in, if it does not run here. ``sources``: those of
    the rows that it scores; none: all.
    """

    name: str
    fn: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    timeout: float = 30.0
    retries: int = 2
    patience: float = PATIENCE
    pool: FunctionPool | None = None
    sources: Sequence[str] = ()
    takes: str = field(init=False)
    is_async: bool = field(init=False)
    at_once: int | None = field(init=False)
    is_service: bool = field(init=False)

    def __post_init__(self) -> None:
        is_class = inspect.isclass(self.fn)
        if is_class and self.pool is None:
            object.__setattr__(self, "fn", self.fn(**self.arguments))
            object.__setattr__(self, "arguments", {})
            is_class = False
        object.__setattr__(self, "takes", find_argument(self.name, self.fn))
        object.__setattr__(self, "at_once", getattr(self.fn, "at_once", None))
        object.__setattr__(self, "is_service", getattr(self.fn, "is_service", False))
        object.__setattr__(self, "is_async", is_coroutine_function(self.fn))

    def call(self, argument: Any) -> Any:
        """Call the function once; an async one returns an awaitable."""
        return self.fn(argument, **self.arguments)

    def is_for(self, sample: Sample) -> bool:
        """Whether the function scores samples of this source, or of none."""
        return not self.sources or sample.meta.get(SOURCE_KEY) in (None, *self.sources)

    def split(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """Split the samples into those of each call, in order."""
        if self.takes == "sample":
            return [[sample] for sample in samples]
        if self.takes == "samples":
            return [list(samples)] if samples else []
        return [list(group) for _, group in itertools.groupby(samples, key=lambda sample: sample.group)]


class RewardCaller:
    """Scores samples with several functions concurrently, on an event loop in a thread of its own.

    The loop lives until ``close``, so async functions may keep their clients open between calls.
    """

    def __init__(self) -> None:
        self._loop = EventLoopThread("rewards")
        self._threads, self._tasks = ThreadPool(), asyncio.Semaphore(_MAX_CALLS)
        self.service_failures: Counter[str] = Counter()  # samples and attempts by function; see `score`

    def start(self, functions: Sequence[RewardFunction]) -> None:
        """Start a process of each function that runs in some. Raises what its module or class raises."""
        for function in functions:
            if start := getattr(function.pool or function.fn, "start", None):
                self._loop.submit(start()).result()

    def score(self, functions: Sequence[RewardFunction], samples: Sequence[Sample]) -> list[list[RewardOutcome]]:
        """For each function the outcomes of the samples that it scores (`RewardFunction.is_for`), in order.

        While a service fails (ServiceError) its calls are repeated, for the function's ``patience``, and counted in
        ``service_failures``. Raises RewardError if too many threads hang, or if an async function blocks the loop.
        """
        future = self._loop.submit(self._score(functions, samples))
        on_loop = [function for function in functions if function.is_async and function.pool is None]
        patience = max((function.timeout for function in on_loop), default=None)
        while not wait([future], timeout=patience).done:
            assert patience is not None
            if self._loop.is_blocked(patience):  # the deadlines run on the same loop, so they cannot end such a call
                names = ", ".join(f"'{function.name}'" for function in on_loop)
                raise RewardError(
                    f"an async reward function ({names}) has blocked its event loop for {patience:g} s: it must await "
                    "whatever takes time (an async HTTP client, asyncio.sleep, asyncio.to_thread), or be a plain `def`"
                )
        return future.result()

    def close(self) -> None:
        """Kill the processes and stop the loop. Calls that still run in threads are abandoned."""
        self._loop.call_soon(close_pools, self._loop.events)
        self._loop.close()

    async def _score(self, functions: Sequence[RewardFunction], samples: Sequence[Sample]) -> list[list[RewardOutcome]]:
        try:
            async with asyncio.TaskGroup() as running:
                tasks = [
                    running.create_task(self._call_with_retries(f, [*filter(f.is_for, samples)])) for f in functions
                ]
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _call_with_retries(self, function: RewardFunction, samples: Sequence[Sample]) -> list[RewardOutcome]:
        """Repeat failed calls until none fails, or its retries or the patience with its service are used up."""
        units = function.split(samples)
        outcomes = await self._attempt(function, units)
        tries: Counter[int] = Counter()  # failed calls by unit, a service's failures left out
        patience = function.patience if function.weight else 0.0  # what is only logged holds up nothing
        deadline = None  # begins anew whenever the service works
        repeat = range(len(units))
        for attempt in itertools.count():
            failed = [i for i in repeat if any(map(_is_worth_repeating, outcomes[i]))]
            waiting = {i for i in failed if patience and any(map(_is_service_failure, outcomes[i]))}
            self.service_failures[function.name] += sum(len(outcomes[i]) for i in waiting)
            tries.update(i for i in failed if i not in waiting)
            deadline = time.monotonic() + patience if deadline is None or len(waiting) < len(repeat) else deadline
            left = deadline - time.monotonic()
            repeat = [i for i in failed if (left > 0 if i in waiting else tries[i] <= function.retries)]
            if not repeat:
                break
            pause = self._pause(attempt, [one for i in repeat for one in outcomes[i]])
            if waiting and left > 0:
                pause = min(pause, left)
                first = next(o for i in sorted(waiting) for o in outcomes[i] if isinstance(o, RewardFailure))
                message = "the service of reward '%s' fails (%d samples; next try in %.1f s, the last in %.0f s): %s"
                log.warning(message, function.name, sum(len(outcomes[i]) for i in waiting), pause, left, first.error)
            await asyncio.sleep(pause)
            for i, unit in zip(repeat, await self._attempt(function, [units[i] for i in repeat]), strict=True):
                outcomes[i] = unit
        return list(itertools.chain.from_iterable(outcomes))

    def _pause(self, attempt: int, outcomes: Sequence[RewardOutcome]) -> float:
        """Seconds before the next attempt: the longest that was asked for, or the backoff if that is more."""
        errors = [outcome.error for outcome in outcomes if isinstance(outcome, RewardFailure)]
        return draw_pause(
            attempt, max((error.seconds for error in errors if isinstance(error, ServiceError)), default=0)
        )

    async def _attempt(self, function: RewardFunction, units: list[list[Sample]]) -> list[list[RewardOutcome]]:
        arguments = [unit[0] for unit in units] if function.takes == "sample" else units
        if function.pool is not None:
            results = await function.pool.run([(argument,) for argument in arguments], function.timeout)
        elif function.is_async:
            free = asyncio.Semaphore(function.at_once) if function.at_once else self._tasks
            results = await asyncio.gather(*(self._await(function, argument, free) for argument in arguments))
        else:
            results = await self._in_threads(function, arguments)
        return [_to_outcomes(function, *result, len(unit)) for result, unit in zip(results, units, strict=True)]

    async def _await(self, function: RewardFunction, argument: Any, free: asyncio.Semaphore) -> CallResult:
        async with free:
            task = asyncio.ensure_future(_catch(function, argument))
            done, _ = await asyncio.wait({task}, timeout=function.timeout)
        if done:
            return task.result()
        task.cancel()
        return None, CallTimeout(function.timeout)

    async def _in_threads(self, function: RewardFunction, arguments: Sequence[Any]) -> list[CallResult]:
        try:
            return await self._threads.run(function.call, arguments, function.timeout)
        except* TooManyHung as hung:
            raise RewardError(
                f"{hung.exceptions[0]}, the last one in '{function.name}' (timeout {function.timeout:g} s). Threads "
                "cannot be stopped: raise the timeout, make the function `async def`, or let it work in a subprocess "
                "with a time limit of its own."
            ) from None


async def _catch(function: RewardFunction, argument: Any) -> CallResult:
    try:
        return await function.call(argument), None
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return None, error


def _is_service_failure(outcome: RewardOutcome) -> bool:
    return isinstance(outcome, RewardFailure) and outcome.reason == "service"


def _is_worth_repeating(outcome: RewardOutcome) -> bool:
    if not isinstance(outcome, RewardFailure) or outcome.reason in BUGS:
        return False
    return not getattr(outcome.error, "gives_up", False)


def _to_outcomes(
    function: RewardFunction, returned: Any, error: BaseException | None, expected: int
) -> list[RewardOutcome]:
    if error is not None:
        return [RewardFailure(_name_reason(function, error), error)] * expected
    return _read_outcomes(function, returned, expected)


def _name_reason(function: RewardFunction, error: BaseException) -> str:
    if isinstance(error, ServiceError) or (function.is_service and isinstance(error, CallTimeout)):
        return "service"
    if isinstance(error, ProcessDied):
        return "died"
    if isinstance(error, CODE_ERRORS):
        return "bug"
    return "timeout" if isinstance(error, CallTimeout) else "raised"


def _read_outcomes(function: RewardFunction, returned: Any, expected: int) -> list[RewardOutcome]:
    """Turn what a call returned into one outcome for each of its ``expected`` samples."""
    if function.takes == "sample":
        return [_to_outcome(returned)]
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(values, (list, tuple)):
        error = TypeError(f"returned {quote(returned)} for {expected} samples; expected a list of {expected} numbers")
        return [RewardFailure("wrong_type", error)] * expected
    if len(values) != expected:
        error = ValueError(f"returned {len(values)} values for {expected} samples")
        return [RewardFailure("wrong_length", error)] * expected
    return [_to_outcome(value) for value in values]


def _to_outcome(value: Any) -> RewardOutcome:
    if isinstance(value, GiveUp):
        return RewardFailure("raised", value)
    entries = dict(value) if isinstance(value, Mapping) else {"reward": value}
    if "reward" not in entries:
        return RewardFailure("wrong_type", TypeError(f"returned a dict without the key 'reward': {quote(value)}"))
    for name, entry in entries.items():
        is_number = hasattr(entry, "__float__") and not getattr(entry, "ndim", 0)
        if name == "reward" and not is_number:
            return RewardFailure("wrong_type", TypeError(f"returned {quote(entry)}; expected a number"))
        try:
            entries[name] = float(entry) if is_number else math.nan
        except OverflowError:  # an integer of a thousand digits, say
            entries[name] = math.inf
    if not math.isfinite(entries["reward"]):
        return RewardFailure("not_finite", ValueError(f"returned {entries['reward']}; expected a finite number"))
    return entries


class _ShortRepr(reprlib.Repr):
    """`repr` of what a service may send, such as lists in lists in lists, of which `repr` makes a RecursionError."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 80

    def repr_int(self, x: int, level: int) -> str:
        return super().repr_int(x, level) if x.bit_length() < 4096 else f"an integer of {x.bit_length()} bits"


def quote(value: Any) -> str:
    """The type and the first characters of any value, for a message."""
    return f"{type(value).__name__} {_ShortRepr().repr(value):.80}" if value is not None else "None"


_DAY_SECONDS = 86400.0  # no deadline of its own: that of the outer reward cancels the inner calls, too


def _check_arity(config: Function, *, expected: Mapping[int, str]) -> Function:
    """Refuse a function that does not exist, gets wrong arguments or takes something else than ``expected``."""
    fn = resolve(config.fn, "coalign.rewards")
    bind(fn, config.arguments, "")
    needed, optional = list_columns(partial(fn.__call__, None) if inspect.isclass(fn) else fn)
    if _arity(needed, optional) not in expected or needed[:1] in (["group"], ["samples"]):
        takes, wanted = ", ".join(needed + optional), " or ".join(expected.values())
        raise ValueError(f"'{config.fn}' takes ({takes}); expected a function of {wanted}")
    return config


def _arity(needed: Sequence[str], optional: Sequence[str]) -> int:
    return len(needed) or len(optional)


# Annotations of arguments that name such a function; its parameters are checked with the configuration.
ValueFunction = Annotated[Function, AfterValidator(partial(_check_arity, expected={1: "one sample"}))]
ComparisonFunction = Annotated[
    Function, AfterValidator(partial(_check_arity, expected={1: "one sample", 2: "two samples"}))
]


class NestedFunction:
    """A plain or async function of ``arity`` 1 (one sample: a reward function) or 2 (two samples).

    A short name is one of coalign.rewards. A class is instantiated once, with the configuration's arguments. What is
    not of this package runs in processes, which end with a call that the outer reward's deadline cancels. Raises
    ConfigError for wrong arguments, ValueError for a function that does not exist.
    """

    def __init__(self, named: Function | str | dict[str, Any]) -> None:
        config = Function.model_validate(named)
        fn: Callable[..., Any] = resolve(config.fn, "coalign.rewards")
        arguments = bind(fn, config.arguments, "")
        self.name = config.fn
        self.at_once: int | None = getattr(fn, "at_once", None)
        self.arity = _arity(*list_columns(partial(fn.__call__, None) if inspect.isclass(fn) else fn))
        self._pool = build_pool(config.fn, fn, arguments)
        self._is_async = is_coroutine_function(fn)
        if self._pool is None:
            self._fn: Any = fn(**arguments) if inspect.isclass(fn) else partial(fn, **arguments)
        self._threads = ThreadPool()

    async def start(self) -> None:
        """Start a process, for which no call's deadline pays. Raises what the module or the class raises."""
        if self._pool is not None:
            await self._pool.start()

    async def __call__(self, calls: Sequence[tuple[Sample, ...]]) -> list[float]:
        """Make the calls concurrently and return their values.

        Raises the error of the first call that failed, and ValueError for a value that is no finite number.
        """
        if self._is_async and self._pool is None:
            return [self._to_number(value) for value in await _gather([self._fn(*call) for call in calls])]
        if self._pool is not None:
            results = await self._pool.run(calls, _DAY_SECONDS)
        else:
            results = await self._threads.run(lambda call: self._fn(*call), calls, _DAY_SECONDS)
        for _, error in results:
            if error is not None:
                raise error
        return [self._to_number(value) for value, _ in results]

    def _to_number(self, value: Any) -> float:
        value = value["reward"] if isinstance(value, dict) and "reward" in value else value
        try:
            number = float(value) if hasattr(value, "__float__") and not getattr(value, "ndim", 0) else math.nan
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise ValueError(f"'{self.name}' returned {quote(value)}; expected a finite number")
        return number


async def _gather(awaitables: Sequence[Any]) -> list[Any]:
    """The results in order. The first failure cancels the other tasks (asyncio.gather lets them run) and is raised."""

    async def wait_for(one: Any) -> Any:
        return await one

    try:
        async with asyncio.TaskGroup() as running:
            tasks = [running.create_task(wait_for(one)) for one in awaitables]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
