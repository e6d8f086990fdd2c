"""Everything that commands show in a terminal: the progress bar, one line a step, tables, samples, warnings.

Results (step lines, tables, ``show``) go to stdout; notes, warnings and the bars of commands go to stderr, so a pipe
carries results only. Without a terminal there are no bars and no control codes, and lines are never wrapped.
"""

from __future__ import annotations

import atexit
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from coalign.config.secrets import hide_secrets
from coalign.files import Sink
from coalign.report.error_text import describe_place
from coalign.report.step_line import (
    ROLLOUTS,
    RunTotals,
    StepColumns,
    describe_goodput,
    fit,
    format_metric,
    format_number,
    list_step_fields,
    smooth_metrics,
)
from coalign.run_files.records import name_group

if TYPE_CHECKING:
    from coalign.types import Sample  # which imports torch: two seconds that `coalign check` does not need

log = logging.getLogger(__name__)

_RECENT = 20  # steps that the pace and the remaining time are estimated from
_SUMMARY = (
    *("eval/mean", "eval/loss/value", "eval/loss/accuracy", "reward/mean", "loss/value", "loss/accuracy"),
    *("tokens/response", "time/step"),
)


class Display:
    """Writes the output of one command. ``quiet`` hides steps, bars and INFO logs; warnings, tables and results stay.

    ``out`` and ``err`` replace the terminal's consoles in tests and notebooks.
    """

    def __init__(self, *, quiet: bool = False, out: Console | None = None, err: Console | None = None) -> None:
        # A response may hold [brackets] and :colons:. A notebook is no terminal, although its kernel asks for colours:
        # it gets the lines that a pipe gets.
        terminal = False if "ipykernel" in sys.modules else None
        settings = {"markup": False, "emoji": False, "highlight": False}
        plain = partial(_Console, **settings, force_jupyter=False, force_terminal=terminal)
        self.out = out or plain()
        self.err = err or plain(stderr=True)
        self.quiet = quiet
        self._screen = Sink("the screen")  # a closed terminal or pipe does not end a run
        self._bar: Progress | None = None
        self._last = 0
        self._started_at = time.monotonic()
        self._times: deque[tuple[int, float]] = deque(maxlen=_RECENT + 1)
        self._history: dict[str, tuple[str, str]] = {}  # metric -> its first and its newest value
        self._smooth: dict[str, float] = {}
        self._totals = RunTotals()
        self._columns = StepColumns()
        self._waiting, self._every = ROLLOUTS, 1

    # ---- training --------------------------------------------------------------------------------------------------

    def start(self, step: int, last: int, *, waiting: str = ROLLOUTS, every: int = 1) -> None:
        """Show the bar of a run that starts or resumes after ``step`` of ``last`` steps.

        ``waiting`` says what the loop waits for before it trains. One in ``every`` steps gets a line.
        """
        self._last, self._started_at, self._waiting, self._every = last, time.monotonic(), waiting, every
        self._times.append((step, self._started_at))
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[pace]}"),
            TextColumn("{task.fields[phase]}", style="dim"),
            console=self.out,
            disable=self._has_no_bar(self.out),
            expand=True,
            refresh_per_second=2,  # leaves the processor to the run
        )
        self._task = self._bar.add_task("", total=last, completed=step, pace="", phase="")
        self._bar.start()
        atexit.register(self.close)  # an error at exit must not leave the terminal without its cursor

    def phase(self, text: str) -> None:
        """Show the phase of the run beside the bar: ``train``."""
        if self._bar is not None:
            self._bar.update(self._task, phase=self._waiting if text == "rollout" else text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print one line for the metrics of a step (names as in metrics.jsonl)."""
        fields = list_step_fields(metrics, self._smooth)
        self._totals.add(metrics)
        for name in {*metrics} & {*_SUMMARY}:
            text = format_metric(metrics, name)
            self._history[name] = (self._history.get(name, (text, text))[0], text)
        smooth_metrics(self._smooth, metrics)
        if step % self._every == 0 or step == self._last or "time/step" not in metrics:  # an evaluation is shown
            self._print_step(f"step {step:>{len(str(self._last))}}/{self._last}", fields)
        self._times.append((step, time.monotonic()))
        if self._bar is not None:
            self._bar.update(self._task, completed=step, pace=self._pace(), phase="")

    def _print_step(self, title: str, fields: list[str]) -> None:
        log.info("%s", " │ ".join([title, *fields]))
        if self.quiet:
            return
        fields = self._columns.align(fields)
        if self.out.is_terminal:
            fields = fit(fields, self.out.width - len(title), len(" │ "))
        line = Text(title)
        for field in fields:
            line.append(" │ ", style="dim").append(field)
        line.rstrip()
        with self._screen.survive():
            self.out.print(line, soft_wrap=True)

    def finish(self, folder: Path, goodput: Mapping[str, float] | None = None) -> None:
        """Remove the bar; print a summary, the use of time (``goodput``: its metrics) and the folder of the results."""
        self.close()
        with self._screen.survive():
            self._print_summary(folder, describe_goodput(goodput or {}, self._waiting))

    def _print_summary(self, folder: Path, goodput: list[str]) -> None:
        rows = {name: self._history[name] for name in _SUMMARY if name in self._history}
        if rows:
            table = _table("", "first", "last")
            for name, values in rows.items():
                table.add_row(name, *values)
            self.out.print(table)
        for name, text in self._totals.rows().items():
            self.out.print(f"{name}: {text}", soft_wrap=True)
        for line in goodput:
            self.out.print(line, soft_wrap=True)
            log.info("%s", line)
        self.out.print(f"{_duration(time.monotonic() - self._started_at)}; results in {folder}", soft_wrap=True)
        asks = f"coalign chat {folder} · " if (folder / "model").exists() else ""
        self.out.print(f"next: {asks}coalign board {folder}", style="dim", soft_wrap=True)

    def close(self) -> None:
        """Remove the bar, if there is one."""
        if self._bar is not None:
            with self._screen.survive():
                self._bar.stop()
            self._bar = None
            atexit.unregister(self.close)

    def _pace(self) -> str:
        (first, started_at), (step, now) = self._times[0], self._times[-1]
        if step == first:
            return ""
        seconds = (now - started_at) / (step - first)
        return f"{format_number(seconds)} s/step, {_duration(seconds * (self._last - step))} left"

    # ---- everything else -------------------------------------------------------------------------------------------

    @contextmanager
    def progress(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show a bar with rate and remaining time; yields the function that advances it by n."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(""), TimeElapsedColumn())
        left = (TextColumn("left:"), TimeRemainingColumn())
        with Progress(*columns, *left, console=self.err, transient=True, disable=self._has_no_bar(self.err)) as bar:
            task = bar.add_task(title, total=total)
            yield lambda n: bar.update(task, advance=n)

    def table(self, title: str, metrics: Mapping[str, float]) -> None:
        """Print names and numbers."""
        table = _table(title, "")
        for name in metrics:
            table.add_row(name, format_metric(metrics, name))
        self.out.print(table)

    def sample(self, sample: Sample) -> None:
        """Print one rollout: prompt, response and reward."""
        title = f"{name_group(sample.group)}, sample {sample.index}"
        text = Group(
            Text(sample.prompt.rstrip(), style="dim"), Rule(style="dim"), Text(sample.response.rstrip() or "(empty)")
        )
        self.out.print(Panel(text, title=title, subtitle=_format_reward(sample), title_align="left"))

    def show(self, content: RenderableType) -> None:
        """Print a result: an unwrapped text, or anything that rich can render."""
        self.out.print(content, soft_wrap=isinstance(content, str | Text))

    def write(self, text: str) -> None:
        """Print a piece of a streamed result."""
        self.out.print(text, end="", soft_wrap=True)
        self.out.file.flush()

    def note(self, text: str) -> None:
        """Print a note to stderr."""
        self.err.print(text, soft_wrap=True)

    def handler(self) -> logging.Handler:
        """Return a handler that prints the package's log: warnings with tracebacks, and the rest unless ``quiet``."""
        handler = _LogHandler(self._find_log_console, logging.WARNING if self.quiet else logging.INFO)
        handler.addFilter(lambda record: record.name != __name__)  # step lines are on the screen already
        return handler

    def _find_log_console(self) -> Console:
        """Return the console of the bar while it is shown, which moves the bar down; another would write into it."""
        return self.out if self._bar is not None and not self._has_no_bar(self.out) else self.err

    def _has_no_bar(self, console: Console) -> bool:
        return self.quiet or not console.is_terminal


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise the error, in place of ending the process as rich does."""
        raise


class _LogHandler(logging.Handler):
    def __init__(self, find_console: Callable[[], Console], level: int) -> None:
        super().__init__(level)
        self._find_console = find_console

    def emit(self, record: logging.LogRecord) -> None:
        said = record.getMessage()
        if record.exc_info and (error := record.exc_info[1]):  # the log file has all of the traceback
            named = [] if str(error) in said else [f"{type(error).__name__}: {error}"]
            said = "\n".join([said, *named, *describe_place(self.format(record))])
        said = hide_secrets(said)
        text = Text(said, style="dim")
        if record.levelno >= logging.WARNING:
            style = "red" if record.levelno >= logging.ERROR else "yellow"
            text = Text(f"{record.levelname.lower()}: {said}", style=style)
        with suppress(OSError):  # the log file has it
            self._find_console().print(text, soft_wrap=True)


class _Rate(TextColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{format_number(task.speed)}/s" if task.speed else "", style="progress.data.speed")


def _format_reward(sample: Sample) -> str:
    terms = ", ".join(f"{name} {format_number(value)}" for name, value in sample.rewards.items())
    reward = "no reward" if sample.reward is None else f"reward {format_number(sample.reward)}"
    ending = f" · {sample.status.name.lower()}" if sample.status else ""  # 0 is OK
    return f"{reward}{f' ({terms})' if terms else ''} · {int(sample.loss_mask.sum())} tokens{ending}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
