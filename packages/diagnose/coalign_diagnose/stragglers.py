"""Compares the step times that ranks write to their logs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from coalign_diagnose.findings import Finding
from coalign_diagnose.logs import LineOrigin, LogFile, split_tags
from coalign_diagnose.rules import find_rule

_STEP = r"(?i)(?:time per iteration|step[ _]time|time_per_step)"
_SECONDS = re.compile(_STEP + r"\D{0,20}?(?P<time>\d+(?:\.\d+)?)")
_MARKS = (b"time per iteration", b"tep_time", b"tep time", b"ime_per_step")
_MIN_STEPS = 5  # step times that a rank must report
_FACTOR = 1.3  # over the median of the other ranks
_MAX_LINES = 20_000


def find_straggler(logs: Sequence[LogFile]) -> Finding | None:
    """Name the rank whose median step takes 1.3 times that of the others; None if fewer than three ranks say theirs."""
    times: dict[int, list[float]] = defaultdict(list)
    last: dict[int, tuple[LogFile, int]] = {}
    for log in logs:
        if not any(mark in log.data for mark in _MARKS):
            continue
        for line in list(log.find(_STEP))[:_MAX_LINES]:
            origin, text = split_tags(log.text(line))
            rank = origin.fill(log.origin).rank
            if rank is not None and (match := _SECONDS.search(text)):
                times[rank].append(float(match["time"]))
                last[rank] = (log, line)
    middle = {rank: median(values) for rank, values in times.items() if len(values) >= _MIN_STEPS}
    if len(middle) < 3:
        return None
    slowest = max(middle, key=lambda rank: middle[rank])
    usual = median(value for rank, value in middle.items() if rank != slowest)
    if middle[slowest] < _FACTOR * usual:
        return None
    text = f"rank {slowest}: {middle[slowest]:g} a step, others {usual:g} (medians of {len(times[slowest])} steps)"
    log, line = last[slowest]
    return Finding(
        find_rule("straggler"), log, line, text, {}, LineOrigin(rank=slowest).fill(log.origin), log.time(line)
    )
