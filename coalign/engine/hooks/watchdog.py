"""Reports a stalled run: its phase, the calls that each process is busy with, and every process's Python stacks.

It ends nothing: that is what `runtime.call_timeout` is for. `kill -USR1` to the process of the command asks for a
report at once.
"""

from __future__ import annotations

import logging
import math
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coalign.cluster.future import Future

if TYPE_CHECKING:
    from coalign.cluster.cluster import Cluster
    from coalign.run_files.state import StateFile

log = logging.getLogger(__name__)

_MAX_POLL_SECONDS = 5.0


class Watchdog:
    """A thread that reports a call which keeps a process busy for ``seconds``, and a run without a busy process.

    A call is reported again whenever its time has doubled. Reports go to the log and, with the stacks, to
    ``folder/<time>/``, and a stall becomes the run's ``state``. With ``seconds`` None, only a signal makes one.
    """

    def __init__(self, cluster: Cluster, folder: Path, state: StateFile, seconds: float | None) -> None:
        self.cluster = cluster
        self.folder = folder
        self.state = state
        self.seconds = math.inf if seconds is None else seconds
        self._phase, self._since = "start", time.monotonic()
        self._busy = time.monotonic()  # when a process was last seen computing
        self._limits: dict[Future, float] = {}  # reported call -> its age in seconds at the next report
        self._idle_limit = self.seconds
        self._asked = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name="coalign-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        self._asked.set()
        self._thread.join()

    def phase(self, name: str) -> None:
        """Set the phase that reports name."""
        self._phase, self._since = name, time.monotonic()

    def report_now(self, *_: Any) -> None:
        """Have the thread write a report at once (a signal handler may call this)."""
        self._asked.set()

    def look(self, now: float) -> str | None:
        """Return why the run is stalled at ``now`` (monotonic clock); None if it is not, or if it was reported."""
        calls = self.cluster.list_pending_calls()
        ages = {call: now - min(since) for call in calls if (since := _find_start_times(call))}
        self._limits = {call: limit for call, limit in self._limits.items() if call in ages}
        if ages:
            self._busy, self._idle_limit = now, self.seconds
        elif now - max(self._busy, self._since) > self._idle_limit:
            self._idle_limit *= 2
            return f"no process has been busy for {now - max(self._busy, self._since):.0f} s"
        overdue = {call: age for call, age in ages.items() if age > self._limits.get(call, self.seconds)}
        if not overdue:
            return None
        self._limits |= {call: 2 * age for call, age in overdue.items()}
        return f"{', '.join(str(call.call) for call in overdue)} without an answer for {max(overdue.values()):.0f} s"

    def report(self, reason: str) -> Path:
        """Write the calls under way and all stacks; return the folder they are in."""
        folder = self.folder / time.strftime("%Y%m%d-%H%M%S")
        folder.mkdir(parents=True, exist_ok=True)
        lines = [
            f"{reason}; phase `{self._phase}` since {_describe_time(self._since)}",
            *self._calls(),
            f"stacks: {folder}",
        ]
        log.warning("%s", "\n  ".join(lines))
        (folder / "report.txt").write_text("\n".join(lines) + "\n")
        for process, text in self.cluster.stacks().items():
            (folder / f"{re.sub(r'[^A-Za-z0-9.-]+', '_', process)}.txt").write_text(text)
        return folder

    def _calls(self) -> Iterator[str]:
        """Yield a line for each process that is busy, and for each call that waits."""
        for call in self.cluster.list_pending_calls():
            if not _find_start_times(call):
                start = _describe_time(call.monotonic_start)
                yield f"{call.call}: waits since {start} (for its inputs, its turn or its devices)"
            for task in call.running:
                if not task.meta.done():
                    yield f"{call.call}: at {task.worker} since {_describe_time(task.monotonic_start)}"

    def _watch(self) -> None:
        pause = min(_MAX_POLL_SECONDS, self.seconds / 4) if math.isfinite(self.seconds) else None
        while not self._closed:
            asked = self._asked.wait(pause)
            self._asked.clear()
            reason = "asked for (SIGUSR1)" if asked else self.look(time.monotonic())
            if reason and not self._closed:
                if not asked:
                    self.state.note("stalled", reason=reason)
                try:
                    self.report(reason)
                except Exception:  # a failed report must not end the run
                    log.exception("the report of a stalled run failed")


@contextmanager
def run_watchdog(cluster: Cluster, folder: Path, state: StateFile, seconds: float | None) -> Iterator[Watchdog]:
    """Run a watchdog during the block; SIGUSR1 makes it report."""
    watchdog = Watchdog(cluster, folder, state, seconds)
    previous_handler = signal.signal(signal.SIGUSR1, watchdog.report_now)
    watchdog.start()
    try:
        yield watchdog
    finally:
        signal.signal(signal.SIGUSR1, previous_handler)
        watchdog.close()


def _find_start_times(call: Future) -> list[float]:
    return [task.monotonic_start for task in call.running if not task.meta.done()]


def _describe_time(when: float) -> str:
    """Return a time of the monotonic clock as hour and age."""
    age = time.monotonic() - when
    return f"{time.strftime('%H:%M:%S', time.localtime(time.time() - age))} ({age:.0f} s)"
