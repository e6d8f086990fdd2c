"""Tells of a run that stands still: which phase, which calls on which processes since when, and every process's Python
stacks, in files. It ends nothing: that is what `runtime.call_timeout` is for.

Also on demand: `kill -USR1` to the process of the command.
"""

from __future__ import annotations

import logging
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coalign.cluster.future import Future

log = logging.getLogger(__name__)

_LOOK = 5.0  # seconds between two looks at most


class Watchdog:
    """A thread that reports a call which a process has been busy with for ``seconds`` (None: never), again each time
    that it has taken twice as long; and a run in which nobody has been busy for as long.

    Reports go to the log and, with the stacks, to ``folder/<time>/``.
    """

    def __init__(self, cluster: Any, folder: Path, seconds: float | None) -> None:
        self.cluster = cluster
        self.folder = folder
        self.seconds = seconds
        self._phase, self._since = "start", time.time()
        self._busy = time.time()  # when anybody was seen computing
        self._limits: dict[Future, float] = {}  # of the calls reported, when they are next
        self._idle_limit = seconds
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
        """What the run does from now on, as reports call it."""
        self._phase, self._since = name, time.time()

    def report_now(self, *_: Any) -> None:
        """Have the thread write a report at once (a handler of signals may call this)."""
        self._asked.set()

    def look(self, now: float) -> str | None:
        """Why the run stands still, if it does and this has not been told."""
        if self.seconds is None:
            return None
        calls = self.cluster.under_way()
        ages = {call: now - min(since) for call in calls if (since := _running_since(call))}
        self._limits = {call: limit for call, limit in self._limits.items() if call in ages}
        if ages:
            self._busy, self._idle_limit = now, self.seconds
        elif now - max(self._busy, self._since) > self._idle_limit:
            self._idle_limit *= 2
            return f"no process has been busy for {now - max(self._busy, self._since):.0f} s"
        late = {call: age for call, age in ages.items() if age > self._limits.get(call, self.seconds)}
        if not late:
            return None
        self._limits |= {call: 2 * age for call, age in late.items()}
        return f"{', '.join(str(call.call) for call in late)} without an answer for {max(late.values()):.0f} s"

    def report(self, reason: str) -> Path:
        """Write what is under way and all stacks; where."""
        place = self.folder / time.strftime("%Y%m%d-%H%M%S")
        place.mkdir(parents=True, exist_ok=True)
        lines = [f"{reason}; phase `{self._phase}` since {_clock(self._since)}", *self._calls(), f"stacks: {place}"]
        log.warning("%s", "\n  ".join(lines))
        (place / "report.txt").write_text("\n".join(lines) + "\n")
        for where, text in self.cluster.stacks().items():
            (place / f"{re.sub(r'[^A-Za-z0-9.-]+', '_', where)}.txt").write_text(text)
        return place

    def _calls(self) -> Iterator[str]:
        """A line for each process that is busy, and for each call that waits."""
        for call in self.cluster.under_way():
            if not _running_since(call):
                yield f"{call.call}: waits since {_clock(call.made)} (for its inputs, its turn or its devices)"
            for each in call.running:
                if not each.meta.done():
                    yield f"{call.call}: at {each.where} since {_clock(each.since)}"

    def _watch(self) -> None:
        pause = min(_LOOK, self.seconds / 4) if self.seconds else None
        while not self._closed:
            asked = self._asked.wait(pause)
            self._asked.clear()
            reason = "asked for (SIGUSR1)" if asked else self.look(time.time())
            if reason and not self._closed:
                try:
                    self.report(reason)
                except Exception:  # the run is more than its report
                    log.exception("the report of a run that stands still failed")


@contextmanager
def watching(cluster: Any, folder: Path, seconds: float | None) -> Iterator[Watchdog]:
    """A watchdog for the time of the block; SIGUSR1 makes it report."""
    watchdog = Watchdog(cluster, folder, seconds)
    before = signal.signal(signal.SIGUSR1, watchdog.report_now)
    watchdog.start()
    try:
        yield watchdog
    finally:
        signal.signal(signal.SIGUSR1, before)
        watchdog.close()


def _running_since(call: Future) -> list[float]:
    return [each.since for each in call.running if not each.meta.done()]


def _clock(when: float) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(when))} ({time.time() - when:.0f} s)"
