"""`coalign sweep`: runs the trials of a sweep, a few at once, and ends those early that its scheduler gives up."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from coalign.cluster.placement.nodes import find_device_kind
from coalign.config import dump
from coalign.config.errors import suggest
from coalign.config.schema import RunConfig
from coalign.launch.fetch import fetch_sources
from coalign.launch.plan import prepare
from coalign.report.display import Display
from coalign.report.step_line import format_number
from coalign.run_files.lock import lock_folder
from coalign_jobs.sweep.config import SweepConfig
from coalign_jobs.sweep.results import show_results
from coalign_jobs.sweep.space import list_settings
from coalign_jobs.sweep.state import SweepState, SweepTrial
from coalign_jobs.sweep.trial import SCREEN, StepReport, TrialEnd, load_trial, run_trial

if TYPE_CHECKING:
    from coalign_jobs.sweep.tune import EarlyStopping

log = logging.getLogger(__name__)
TIMING_PREFIX = "time/"  # metrics that nobody means, and that messages leave out


def run_sweep(config: SweepConfig, display: Display, *, resume: bool = False) -> int:
    """Run the trials that are not finished; return the exit code: 0, 1 if trials failed, 128 + a signal's number.

    Raises ConfigError for settings that a trial cannot have, before anything starts, and ValueError if the folder
    holds another sweep, or one that ``resume`` does not ask for, and for a metric that trials do not report.
    """
    settings = list_settings(config)
    configs = [load_trial(config.base, values, Path(config.output) / "trial") for values in settings]
    state = SweepState.create(config, dump(load_trial(config.base, {}, Path(config.output) / "trial")), settings)
    check_metric(config, configs)
    prepare(fetch_sources(configs[0], weights=False, rows=False), join=False)
    scheduler = build_scheduler(config, configs[0])
    with lock_folder(state.folder):
        if state.exists():
            if not resume:
                raise ValueError(f"{state.folder} holds a sweep: `--resume` goes on with it, or give another `output`")
            state.load()
        state.save()
        runner = SweepRunner(config, state, scheduler, share_devices(config, configs[0]), display)
        with _interrupted_by_sigterm():
            code = runner.run()
        show_results(config, state, display)
    return code


def check_metric(config: SweepConfig, configs: Sequence[RunConfig]) -> None:
    """Raise ValueError for a metric of evaluations, if a trial has none."""
    if config.metric.startswith("eval/") and any(not trial.data.eval for trial in configs):
        raise ValueError(f"metric: '{config.metric}' comes from evaluation, and the run has no data.eval")


def build_scheduler(config: SweepConfig, run: RunConfig) -> EarlyStopping | None:
    """Return the scheduler that ends trials early; None without one. ImportError without Ray."""
    if config.scheduler == "none":
        return None
    try:
        from coalign_jobs.sweep.tune import EarlyStopping
    except ModuleNotFoundError as error:
        raise ImportError(
            f"scheduler: {config.scheduler} is Ray Tune's, and {error.name} is not installed: pip install "
            "'coalign[ray]', or use `scheduler: none`"
        ) from None
    if config.scheduler == "median":
        return EarlyStopping.by_median(config.mode, config.median.grace_steps, config.median.min_trials)
    if run.runtime.steps is None:
        raise ValueError("scheduler: asha needs the number of steps of a trial: set `runtime.steps` in the base")
    asha = config.asha
    return EarlyStopping.by_halving(config.mode, run.runtime.steps, asha.grace_steps, asha.reduction)


def share_devices(config: SweepConfig, run: RunConfig) -> list[dict[str, str]]:
    """Return for each trial that runs at once the environment variables that show it its share of the devices."""
    alone: list[dict[str, str]] = [{} for _ in range(config.concurrent)]
    if config.concurrent == 1 or run.runtime.ray_address or not torch.accelerator.is_available():
        return alone
    name, count = str(torch.accelerator.current_accelerator()), torch.accelerator.device_count()
    share = count // config.concurrent
    if not share:
        raise ValueError(f"concurrent: {config.concurrent} trials at once, and this machine has {count} {name} devices")
    accelerator = find_device_kind(name)
    names = accelerator.list_names(count)
    return [{accelerator.visible: ",".join(names[i * share : (i + 1) * share])} for i in range(config.concurrent)]


class RunningTrial:
    """A trial in a process of its own, in one of the slots for trials that run at once."""

    def __init__(self, trial: SweepTrial, slot: int, config: SweepConfig, visible: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self.trial, self.slot, self.visible, self.started_at = trial, slot, visible, time.monotonic()
        self.folder = Path(config.output) / trial.name
        self.connection, theirs = context.Pipe()
        arguments = (theirs, config.base, trial.settings, self.folder, config.metric, visible)
        self.process = context.Process(target=run_trial, args=arguments, name=f"coalign-{trial.name}")
        self.process.start()
        theirs.close()
        self.names: set[str] = set()  # metrics that it has reported
        self.is_stopped = False  # by the scheduler

    def receive(self) -> StepReport | TrialEnd:
        """Return its next message; the end of a process that said nothing before it ended is an error."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            return TrialEnd(1, f"its process ended (exit code {self.process.exitcode}); see {self.folder / SCREEN}")

    def send(self, goes_on: bool) -> None:
        """Answer a report. A process that has ended meanwhile says so by itself."""
        with suppress(OSError):
            self.connection.send(goes_on)


class SweepRunner:
    """Starts trials as slots become free, answers their reports, and keeps their state."""

    def __init__(
        self,
        config: SweepConfig,
        state: SweepState,
        scheduler: EarlyStopping | None,
        slots: Sequence[Mapping[str, str]],
        display: Display,
    ) -> None:
        self._config, self._state, self._scheduler, self._display = config, state, scheduler, display
        self._free_slots = dict(enumerate(slots))
        self._running: list[RunningTrial] = []
        self._is_ending = False
        self._reports = state.reports
        if scheduler is not None:
            for trial, step, value in state.list_reports():
                scheduler.goes_on(trial.name, step, value)

    def run(self) -> int:
        """Run all trials that wait. After SIGINT or SIGTERM running ones end with a checkpoint; see `run_sweep`."""
        waiting = [trial for trial in self._state.trials if trial.status == "waiting"]
        try:
            while waiting or self._running:
                while waiting and self._free_slots:
                    self._begin(waiting.pop(0))
                for running in self._wait():
                    self._answer(running)
        except KeyboardInterrupt:
            self._end_all()
            self._display.note("stopped; `--resume` goes on from the checkpoints of the trials")
            return 128 + signal.SIGINT
        except BaseException:
            self._end_all()
            raise
        return 1 if any(trial.status == "failed" for trial in self._state.trials) else 0

    def _begin(self, trial: SweepTrial) -> None:
        slot = min(self._free_slots)
        running = RunningTrial(trial, slot, self._config, self._free_slots.pop(slot))
        self._running.append(running)
        trial.status = "running"
        self._state.save()
        goes_on = (running.folder / "checkpoints").exists()
        self._display.note(f"{trial.name}: {'goes on' if goes_on else 'begins'}")

    def _answer(self, running: RunningTrial) -> None:
        message = running.receive()
        if isinstance(message, TrialEnd):
            self._finish(running, message)
            return
        trial = running.trial
        trial.step, running.names = message.step, running.names | message.names
        goes_on = True
        if message.value is None:
            if not self._is_ending and not self._config.metric.startswith("eval/"):  # an evaluation may come later
                self._refuse_metric(running.names)
        else:
            trial.value = message.value
            self._reports.append({"step": message.step, "trial": trial.number, "value": message.value})
            goes_on = self._scheduler is None or self._scheduler.goes_on(trial.name, message.step, message.value)
        running.is_stopped = not goes_on
        running.send(goes_on)

    def _refuse_metric(self, names: set[str]) -> None:
        reported = sorted(name for name in names if not name.startswith(TIMING_PREFIX))
        near = suggest(self._config.metric, reported)
        raise ValueError(f"metric: no trial reports '{self._config.metric}'{near}; they report {', '.join(reported)}")

    def _finish(self, running: RunningTrial, end: TrialEnd) -> None:
        trial = running.trial
        running.process.join()
        self._running.remove(running)
        running.connection.close()
        self._free_slots[running.slot] = running.visible
        trial.seconds += time.monotonic() - running.started_at
        trial.error = end.error
        if end.error or (end.code and end.code < 128):
            trial.status = "failed"
            trial.error = end.error or f"exit code {end.code}: the run's guards ended it; see {running.folder}/log.txt"
        elif end.code:
            trial.status = "waiting"  # a signal has ended it
        else:
            trial.status = "stopped" if running.is_stopped else "finished"
        self._state.save()
        if trial.status == "finished" and trial.value is None and running.names and not self._is_ending:
            self._refuse_metric(running.names)
        value = "" if trial.value is None else f", {self._config.metric} {format_number(trial.value)}"
        self._display.note(
            f"{trial.name}: {trial.status} at step {trial.step}{value}{trial.error and ': '}{trial.error}"
        )

    def _end_all(self) -> None:
        """Let all running trials end after their step, with a checkpoint; once more interrupted, at once."""
        self._is_ending = True
        for running in self._running:
            running.process.terminate()
            running.send(False)  # it may be waiting for an answer that an error has kept from it
        try:
            while self._running:
                for running in self._wait():
                    self._answer(running)
        except KeyboardInterrupt:
            for running in self._running:
                running.process.kill()

    def _wait(self) -> list[RunningTrial]:
        """Wait for messages; return the trials that have sent one."""
        ready = wait([running.connection for running in self._running])
        return [running for running in self._running if running.connection in ready]


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the sweep as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
