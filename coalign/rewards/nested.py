"""Functions that another reward's configuration names: what a tournament compares by, what a length reward asks for."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator

from coalign.config.functions import bind, list_columns, resolve
from coalign.config.schema import Function
from coalign.rewards.threads import ThreadPool
from coalign.types import Sample

_SECONDS = 86400.0  # the deadline is that of the reward that asks; it ends the wait for its functions too


def _taking(config: Function, *, expected: Mapping[int, str]) -> Function:
    """Refuse (ConfigError, ValueError) a function that is not there, gets wrong arguments or takes something else."""
    fn = resolve(config.fn, "coalign.rewards")
    bind(fn, config.arguments, "")
    needed, optional = list_columns(partial(fn.__call__, None) if inspect.isclass(fn) else fn)
    if _arity(needed, optional) not in expected or needed[:1] in (["group"], ["samples"]):
        takes, wanted = ", ".join(needed + optional), " or ".join(expected.values())
        raise ValueError(f"'{config.fn}' takes ({takes}); expected a function of {wanted}")
    return config


def _arity(needed: Sequence[str], optional: Sequence[str]) -> int:
    return len(needed) or len(optional)


# Annotations of the arguments that name such a function: what it takes is checked with the configuration.
Valuing = Annotated[Function, AfterValidator(partial(_taking, expected={1: "one sample"}))]
Comparing = Annotated[Function, AfterValidator(partial(_taking, expected={1: "one sample", 2: "two samples"}))]


class Nested:
    """A plain or async function of ``arity`` 1 (a sample; a reward function) or 2 (two samples); of a class one object
    is made. A short name is one of coalign.rewards."""

    def __init__(self, named: Function | str | dict[str, Any]) -> None:
        """Raises ConfigError for wrong arguments, ValueError for a function that is not there."""
        config = Function.model_validate(named)  # a text is a function's name
        fn = resolve(config.fn, "coalign.rewards")
        arguments = bind(fn, config.arguments, "")
        self.name = config.fn
        self._fn = fn(**arguments) if inspect.isclass(fn) else partial(fn, **arguments)
        self.arity = _arity(*list_columns(self._fn))
        self._waits = any(map(inspect.iscoroutinefunction, (fn, type(self._fn).__call__)))
        self._threads = ThreadPool()

    async def __call__(self, calls: Sequence[tuple[Sample, ...]]) -> list[float]:
        """The value of each call, made concurrently. Raises what the first one that failed raised, and ValueError for
        what is no finite number."""
        if self._waits:
            returned = await _gather([self._fn(*call) for call in calls])
        else:
            settled = await self._threads.run(lambda call: self._fn(*call), calls, _SECONDS)
            for _, error in settled:
                if error is not None:
                    raise error
            returned = [value for value, _ in settled]
        return [self._number(value) for value in returned]

    def _number(self, value: Any) -> float:
        value = value["reward"] if isinstance(value, dict) and "reward" in value else value
        if not hasattr(value, "__float__") or getattr(value, "ndim", 0) or not math.isfinite(value):
            raise ValueError(f"'{self.name}' returned {value!r:.80}; expected a finite number")
        return float(value)


async def _gather(awaitables: Sequence[Any]) -> list[Any]:
    """The results in order. The first failure cancels the others, and is raised."""

    async def awaited(one: Any) -> Any:
        return await one

    try:
        async with asyncio.TaskGroup() as running:
            tasks = [running.create_task(awaited(one)) for one in awaitables]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
