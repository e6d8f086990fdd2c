"""The process of one trial: an ordinary run, which tells its sweep of every step and ends early if that says so."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from coalign.engine.engine import Hook
from coalign.engine.hooks.run_folder import flatten_stats
from coalign.launch.plan import find_recipe
from coalign.report.display import Display
from coalign.types import Stats

if TYPE_CHECKING:
    from coalign.cluster.batch_ref import BatchRef
    from coalign.config.schema import RunConfig
    from coalign.engine.engine import Engine

SCREEN = "screen.txt"  # in the folder of a trial: what the run would show


@dataclass(frozen=True)
class StepReport:
    """A step of a trial: the value of the sweep's metric (None: the step has none), and the names of all metrics."""

    step: int
    value: float | None
    names: frozenset[str]


@dataclass(frozen=True)
class TrialEnd:
    """The end of a trial: the run's exit code, or its error."""

    code: int
    error: str = ""


class TrialReporter(Hook):
    """Sends a StepReport after each step, and waits for the answer: whether to go on."""

    def __init__(self, connection: Connection, metric: str) -> None:
        self._connection, self._metric = connection, metric

    def after_step(self, engine: Engine, stats: Stats, batch: BatchRef) -> None:
        numbers = flatten_stats(stats)
        value = numbers.get(self._metric)
        # One that is not finite cannot be compared. The last value counts, so a run that ends in NaN has none.
        finite = value if value is not None and math.isfinite(value) else None
        try:
            self._connection.send(StepReport(engine.step, finite, frozenset(numbers)))
            goes_on = self._connection.recv()
        except (EOFError, OSError):
            engine.progress.request_stop("its sweep has ended")
            return
        if not goes_on and not engine.complete:
            engine.progress.request_stop("the scheduler of the sweep has ended this trial")


def load_trial(base: str, settings: Mapping[str, Any], folder: Path) -> RunConfig:
    """Load the configuration of a trial: that of the base, with other settings and a folder. Raises ConfigError."""
    from coalign.config import load  # a process of its own begins here

    return load(base, {**settings, "output": str(folder)}, defaults=lambda name: find_recipe(name).defaults)


def run_trial(
    connection: Connection,
    base: str,
    settings: Mapping[str, Any],
    folder: Path,
    metric: str,
    visible: Mapping[str, str],
) -> None:
    """Run a trial to its end, which is the last message. ``visible``: environment variables that show its devices."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the sweep gets Ctrl-C, and passes it on
    os.environ.update(visible)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / SCREEN, "a", encoding="utf-8") as screen:
        console = Console(file=screen, width=120)
        display = Display(out=console, err=console)
        try:
            from coalign.launch.run import train

            code = train(load_trial(base, settings, folder), display, [TrialReporter(connection, metric)])
            end = TrialEnd(code)
        except Exception as error:
            end = TrialEnd(1, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
    connection.send(end)
    connection.close()
