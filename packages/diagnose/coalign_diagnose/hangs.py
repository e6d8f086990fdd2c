"""Compares the stacks of processes that hang: a run's `stalls` folder, py-spy's dumps, faulthandler's."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from coalign_diagnose.findings import Finding
from coalign_diagnose.logs import LineOrigin, LogFile
from coalign_diagnose.rules import find_rule

_FAULT_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)$')
_SPY_FRAME = re.compile(r"^\s+(?P<function>\S+) \((?P<file>[^():]+):(?P<line>\d+)\)$")
_SPY_PROCESS = re.compile(r"^Process (?P<pid>\d+): (?P<command>.*)$")
_MARKS = (b"most recent call first", b"Python v")  # how dumps of faulthandler and py-spy begin
_WAITING = re.compile(
    r"all_?reduce|all_?gather|reduce_?scatter|barrier|broadcast|all_?to_?all|\brecv\b|\bwait\b|synchronize|"
    r"irecv|isend|wait_event|monitored_barrier|_wait_for",
    re.IGNORECASE,
)
_IDLE = re.compile(
    r"threading\.py|selectors\.py|queue\.py|concurrent/futures|socketserver|_watch|event_loop|poll", re.I
)
_WAITS = re.compile(r"(?i)\bwait|heartbeat|no (?:progress|response|answer)|pending|still ")
_LIVES = re.compile(r'"GET /(?:health|ping|metrics|v1/models)\S* HTTP')
_GIVEN_UP = re.compile(
    r"(?i)without (?:output|progress)|no progress|stopped by (?:the )?(?:user|operator)|ended by|stuck|hang|hung|"
    r"cancel|time limit|kill|interrupt|\^C|SIG(?:INT|TERM)"
)
_NOT_UP = re.compile(r"(?i)\b(?:is )?not (?:up|ready|reachable|available)(?: yet)?\b.*\bretry")
_LEAST_REPEATS = 5
_MOST_REPEATS = 5_000  # lines read from the end of a log
_LAST_WORDS = 3  # lines after the repeated ones
_STANDSTILL = 1800.0  # seconds
_MOST_FRAMES = 4000  # lines of stacks that are compared


@dataclass(frozen=True)
class ProcessStack:
    """The stack of a process's main thread, innermost frame first, as texts `function (file:line)`."""

    name: str
    log: LogFile
    line: int
    frames: tuple[str, ...]

    @property
    def waits(self) -> bool:
        """Whether the process is inside of a collective or a similar call."""
        return any(_WAITING.search(frame) for frame in self.frames[:6])


def find_hang(logs: Sequence[LogFile]) -> Finding | None:
    """Name the process that is elsewhere than the others, which wait; None without stacks, or if none stands out."""
    stacks = [stack for log in logs for stack in _read_stacks(log)]
    waiting = [stack for stack in stacks if stack.waits]
    away = [stack for stack in stacks if not stack.waits and stack.frames and not _IDLE.search(stack.frames[0])]
    if not waiting or not away or len(away) > len(waiting):
        return None
    stack = away[0]
    usual = Counter(waiting_stack.frames[0] for waiting_stack in waiting).most_common(1)[0]
    text = f"{stack.name} is in {stack.frames[0]}, while {usual[1]} of {len(stacks)} wait in {usual[0]}"
    rank = re.search(r"rank[ _-]?(\d+)", stack.name)
    origin = LineOrigin(int(rank[1]) if rank else None, actor=stack.name)
    return Finding(find_rule("hang-ranks"), stack.log, stack.line, text, {}, origin, None)


def find_standstill(logs: Sequence[LogFile]) -> Finding | None:
    """Name the line before a log only repeats, for half an hour or more, that something waits.

    A server's log that only repeats health checks must end with the words of somebody who gave it up.
    """
    for log in logs:
        lines = [line for line in range(max(len(log) - _MOST_REPEATS, 0), len(log)) if log.text(line).strip()]
        for given_up in range(min(_LAST_WORDS, max(len(lines) - 1, 0)) + 1):
            end = len(lines) - given_up - 1
            if end < 0:
                break
            text, words = log.text(lines[end]), " ".join(log.text(line) for line in lines[end + 1 :])
            waits = _WAITS.search(text) is not None or _NOT_UP.search(text) is not None
            if not waits and not (_LIVES.search(text) and _GIVEN_UP.search(words)):
                continue
            if given_up and not _GIVEN_UP.search(words):
                continue
            skeleton, first = re.sub(r"\d+", "", text), end
            while first > 0 and re.sub(r"\d+", "", log.text(lines[first - 1])) == skeleton:
                first -= 1
            started_at, ended = log.time(lines[first]), log.time(lines[end])
            asks_in_vain = not given_up and end - first >= 2 and _NOT_UP.search(text)
            is_long = started_at is not None and ended is not None and (ended - started_at) % 86400 >= _STANDSTILL
            if asks_in_vain or (end - first >= _LEAST_REPEATS and is_long):
                line = lines[max(first - 1, 0)]
                return Finding(
                    find_rule("standstill"), log, line, log.text(line).strip(), {}, log.origin, log.time(line)
                )
    return None


def _read_stacks(log: LogFile) -> Iterator[ProcessStack]:
    """Yield the main threads' stacks of a dump: py-spy lists them first, faulthandler last."""
    if not any(mark in log.data for mark in _MARKS):
        return
    frames: list[str] = []
    name, first, in_spy = log.name.rsplit("/", 1)[-1].removesuffix(".txt"), 0, False
    for line in list(
        log.find(r'most recent call first|^Process \d+: |^\s+File ".*, line \d+ in |^\s+\S+ \(.*:\d+\)|^Thread ')
    )[:_MOST_FRAMES]:
        text = log.text(line)
        if process := _SPY_PROCESS.match(text):
            if frames:
                yield ProcessStack(name, log, first, tuple(frames))
            name, frames, in_spy = f"process {process['pid']}", [], True
        elif text.startswith(("Thread", "Current thread")):
            if not in_spy or "MainThread" in text or not frames:
                frames, first = [], line
            else:
                in_spy = False  # py-spy lists the main thread first
        elif (frame := _FAULT_FRAME.match(text) or _SPY_FRAME.match(text)) and (in_spy or not _SPY_FRAME.match(text)):
            frames.append(f"{frame['function']} ({frame['file'].rsplit('/', 1)[-1]}:{frame['line']})")
    if frames:
        yield ProcessStack(name, log, first, tuple(frames))
