"""The settings of the trials of a sweep: all combinations of lists, or draws from distributions."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

from coalign.config.errors import ConfigError, ConfigProblem, Conflict, format_value, suggest
from coalign_jobs.sweep.config import SweepConfig

Draw = Callable[[random.Random], Any]
LONGEST_NAME = 60  # characters in a folder's name that tell settings


def list_settings(config: SweepConfig) -> list[dict[str, Any]]:
    """List the settings of each trial: values by dotted key. ConfigError for a space that cannot be searched."""
    problems = []
    draws: dict[str, Draw] = {}
    grids: dict[str, list[Any]] = {}
    for key, values in config.space.items():
        try:
            draws[key] = read_values(values)
            listed = values.get("choice") if isinstance(values, dict) else values
            if listed is not None:
                grids[key] = listed
            elif config.search == "grid":
                raise Conflict((), f"is {format_value(values)}: a grid takes lists; use `search: random`")
        except Conflict as conflict:
            problems.append(ConfigProblem(("space", key), conflict.message))
    if problems:
        raise ConfigError(problems)
    if config.search == "grid":
        return [dict(zip(grids, values, strict=True)) for values in itertools.product(*grids.values())]
    chance = random.Random(config.seed)
    return [{key: draw(chance) for key, draw in draws.items()} for _ in range(config.trials or 0)]


def read_values(values: Any) -> Draw:
    """Return the function that draws from a list or a distribution. Raises Conflict for what is neither."""
    distribution, given = "choice", values
    if isinstance(values, dict):
        if len(values) != 1:
            raise Conflict((), f"is {format_value(values)}; expected one of {', '.join(DISTRIBUTIONS)}")
        [(distribution, given)] = values.items()
    if distribution not in DISTRIBUTIONS:
        raise Conflict((), f"there is no distribution '{distribution}'{suggest(str(distribution), DISTRIBUTIONS)}")
    if not isinstance(given, list):
        raise Conflict((), f"is {format_value(values)}; expected a list of values, or a distribution")
    if not given:
        raise Conflict((), "has no values")
    return DISTRIBUTIONS[distribution](given)


def _choice(values: list[Any]) -> Draw:
    return lambda chance: chance.choice(values)


def _uniform(values: list[Any]) -> Draw:
    low, high = _read_bounds(values, int | float)
    return lambda chance: chance.uniform(low, high)


def _loguniform(values: list[Any]) -> Draw:
    low, high = _read_bounds(values, int | float)
    if low <= 0:
        raise Conflict((), f"loguniform begins at {low}; expected a number above 0")
    return lambda chance: math.exp(chance.uniform(math.log(low), math.log(high)))


def _randint(values: list[Any]) -> Draw:
    low, high = _read_bounds(values, int)
    return lambda chance: chance.randint(low, high)


def _read_bounds(values: list[Any], number_type: Any) -> tuple[Any, Any]:
    numbers = [value for value in values if isinstance(value, number_type) and not isinstance(value, bool)]
    if len(values) != 2 or len(numbers) != 2 or numbers[0] >= numbers[1]:
        raise Conflict((), f"is {format_value(values)}; expected two numbers, the lower one first")
    return numbers[0], numbers[1]


DISTRIBUTIONS: Mapping[str, Callable[[list[Any]], Draw]] = {
    "choice": _choice,
    "uniform": _uniform,
    "loguniform": _loguniform,
    "randint": _randint,
}


def name_trial(number: int, settings: Mapping[str, Any]) -> str:
    """Return the name of a trial's folder, which tells its settings.

    Example: ``name_trial(3, {"models.trainer.optimizer.lr": 1e-05})`` is ``trial_003_lr=1e-05``.
    """
    texts = [f"{key.rpartition('.')[2]}={format_setting(value)}" for key, value in settings.items()]
    text = re.sub(r"[^\w.=+-]+", "-", "_".join(texts))[:LONGEST_NAME].strip("-_.")
    return f"trial_{number:03d}_{text}"


def format_setting(value: Any) -> str:
    """Return a value as tables show it: a float has four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
