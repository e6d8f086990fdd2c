"""Functions that another reward's configuration names, such as what a tournament compares by."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator

from coalign.config.functions import bind, list_columns, resolve
from coalign.config.schema import Function
from coalign.function_process import build_pool, is_coroutine_function
from coalign.rewards.calls import quote
from coalign.threads import ThreadPool
from coalign.types import Sample

_SECONDS = 86400.0  # no deadline of its own: that of the outer reward cancels the inner calls too


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
            results = await self._pool.run(calls, _SECONDS)
        else:
            results = await self._threads.run(lambda call: self._fn(*call), calls, _SECONDS)
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
