"""Compares the ranks of a collective that timed out: who was late, or called another one."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from coalign_diagnose.findings import Finding
from coalign_diagnose.logs import LineOrigin, LogFile

_CALL = re.compile(
    r"\[Rank (?P<rank>\d+)\].*?Work\w*CCL\((?:SeqNum=(?P<sequence>\d+), )?OpType=(?P<operation>\w+)"
    r"(?:, NumelIn=(?P<numel>\d+))?"
)
_STATE = re.compile(
    r"Rank (?P<rank>\d+)\].*?last enqueued (?:NCCL )?work: (?P<enqueued>-?\d+), last completed (?:NCCL )?work: "
    r"(?P<completed>-?\d+)"
)
_SIZE = re.compile(r"world[_ ]size['\":= ]{1,4}(\d+)|nranks (\d+)|WORLD_SIZE[=: ]+(\d+)", re.IGNORECASE)
_HEAD_BYTES = 1 << 22  # the beginning of a log, in which the number of ranks is looked for
_BARRIER = re.compile(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier")


@dataclass(frozen=True)
class LateRank:
    """Which rank the others waited for, in words, with lines that show it. ``origin``: None if nobody stands out."""

    origin: LineOrigin | None
    text: str
    evidence: tuple[tuple[str, str], ...] = ()


def compare_collectives(findings: Sequence[Finding], logs: Sequence[LogFile]) -> LateRank | None:
    """Compare what each rank reports of the collective that timed out; None if no line has a rank and a number."""
    first_timeouts: dict[int, tuple[int, str, Finding]] = {}
    states: dict[int, tuple[int, int, Finding]] = {}
    for finding in findings:
        if (match := _BARRIER.search(finding.text)) is not None:
            return LateRank(LineOrigin(rank=int(match[1].split(",")[0])), f"ranks {match[1].strip()} did not arrive")
        if match := _CALL.search(finding.text):
            first_timeouts.setdefault(int(match["rank"]), (int(match["sequence"] or 0), match["operation"], finding))
    for log in {id(finding.log): finding.log for finding in findings}.values():
        for line in log.find("last enqueued .*work: .*last completed"):
            if match := _STATE.search(log.text(line)):
                rank = int(match["rank"])
                states.setdefault(rank, (int(match["enqueued"]), int(match["completed"]), _at(findings, log, line)))
    if not first_timeouts:
        return None
    operations: dict[int, Counter[str]] = defaultdict(Counter)
    for sequence, operation, _ in first_timeouts.values():
        operations[sequence][operation] += 1
    return (
        _find_other_call(first_timeouts, operations)
        or _find_behind({rank: (state[0], state[2]) for rank, state in states.items()}, "last enqueued number")
        or _find_absent(first_timeouts, logs)
        or _find_behind({rank: (call[0], call[2]) for rank, call in first_timeouts.items()}, "number of the collective")
        or LateRank(None, f"all {len(first_timeouts)} ranks that report it wait in the same collective")
    )


def _find_other_call(
    first_timeouts: dict[int, tuple[int, str, Finding]], operations: dict[int, Counter[str]]
) -> LateRank | None:
    """Name a rank of the minority where ranks called different collectives under one number."""
    for rank, (sequence, operation, finding) in sorted(first_timeouts.items()):
        counts = operations[sequence]
        if len(counts) > 1 and operation != counts.most_common(1)[0][0]:
            usual = counts.most_common(1)[0][0]
            text = (
                f"rank {rank} called {operation} where others called {usual} (number {sequence}): they took other ways"
            )
            return LateRank(LineOrigin(rank=rank).fill(finding.origin), text, ((finding.place, finding.text[:200]),))
    return None


def _find_behind(numbers: dict[int, tuple[int, Finding]], what: str) -> LateRank | None:
    """Name the ranks whose number is lower than the highest, if they are fewer than half."""
    if not numbers:
        return None
    highest = max(number for number, _ in numbers.values())
    behind = sorted(rank for rank, (number, _) in numbers.items() if number < highest)
    if not behind or 2 * len(behind) > len(numbers):
        return None
    rank = min(behind, key=lambda candidate: numbers[candidate][0])
    number, finding = numbers[rank]
    text = f"rank {rank} is behind: its {what} is {number}, that of others {highest}"
    return LateRank(LineOrigin(rank=rank), text, ((finding.place, finding.text[:200]),))


def _find_absent(calls: dict[int, tuple[int, str, Finding]], logs: Sequence[LogFile]) -> LateRank | None:
    """Name the ranks that report no timeout, if the number of ranks is known and they are fewer than half."""
    sizes = [log.origin.rank + 1 for log in logs if log.origin.rank is not None]
    for log in logs:
        sizes_in_log = _SIZE.findall(log.data[:_HEAD_BYTES].decode("utf-8", "replace")) if not sizes else []
        sizes += [int(next(filter(None, groups))) for groups in sizes_in_log[:50]]
    size = max([*sizes, max(calls) + 1])
    absent = [rank for rank in range(size) if rank not in calls]
    if not absent or 2 * len(absent) > size:
        return None
    names = ", ".join(map(str, absent[:8])) + (" …" if len(absent) > 8 else "")
    text = f"{len(calls)} ranks waited, and of rank {names} no timeout is reported: the others waited for it"
    return LateRank(LineOrigin(rank=absent[0]), text)


def find_last_deed(finding: Finding, rank: int, logs: Sequence[LogFile]) -> tuple[str, str] | None:
    """Return the last line that the log of a rank has before its errors: what it did while the others waited."""
    log = next((log for log in logs if log.origin.rank == rank), None)
    if log is None:
        return None
    for line in range(len(log)):
        if "WorkNCCL" in log.text(line) or "monitoredBarrier" in log.text(line):
            return (f"{log.name}:{log.number(line - 1)}", log.text(line - 1).strip()) if line else None
    last = len(log) - 1
    return (f"{log.name}:{log.number(last)}", log.text(last).strip()) if last >= 0 and log is not finding.log else None


def _at(findings: Sequence[Finding], log: LogFile, line: int) -> Finding:
    """Return a finding of the file, to say where a line is."""
    first = next(finding for finding in findings if finding.log is log)
    return Finding(first.rule, log, line, log.text(line).strip(), origin=first.origin)
