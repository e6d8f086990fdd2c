"""Writes a verdict for people (the cause in the first line) and for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from coalign_diagnose.logs import LogFile
from coalign_diagnose.verdict import RunDiagnosis, judge_paths

_WIDTH = 240  # characters of a line of evidence


def diagnose(paths: Sequence[str], *, as_json: bool = False) -> tuple[str, int]:
    """Judge logs; return the answer as text or JSON, and the exit code: 1 if they hold no cause that a rule knows.

    Raises OSError or ValueError for logs that cannot be read.
    """
    verdict, logs = judge_paths(paths)
    answer = json.dumps(to_json(verdict, logs), indent=1) if as_json else write_report(verdict, logs)
    return answer, int(verdict.cause is None or verdict.cause.rule is None)


def write_report(verdict: RunDiagnosis, logs: Sequence[LogFile]) -> str:
    """Return the answer: cause, where it began, evidence, why, what to do, other candidates."""
    cause = verdict.cause
    if cause is None:
        passed = f"; it went on after {verdict.passed} errors" if verdict.passed else ""
        return f"no failure found in {logs[0].name if len(logs) == 1 else f'{len(logs)} logs'}{passed}"
    lines = [f"cause: {cause.title}"]
    if origin := str(verdict.origin):
        lines.append(f"began in: {origin}")
    lines += [f"  {location}: {text[:_WIDTH]}" for location, text in verdict.evidence]
    lines.append(f"sure: {verdict.sure} ({'; '.join(verdict.reasons)})")
    if cause.rule:
        lines.append(f"do: {cause.rule.advice}")
        if cause.rule.settings and is_coalign_run(logs):
            lines.append(f"settings: {cause.rule.settings}")
    else:
        lines.append("do: The message is the program's own; look at the place shown, and at what it was given there.")
    if verdict.candidates:
        lines += ["other candidates:", *(f"  {cause.title[:160]}, {cause.place}" for cause in verdict.candidates)]
    return "\n".join(lines)


def to_json(verdict: RunDiagnosis, logs: Sequence[LogFile]) -> dict[str, Any]:
    """Return the answer as plain values. ``cause`` is a rule's id, `unknown`, or None if nothing failed."""
    cause = verdict.cause
    if cause is None:
        return {"cause": None, "files": len(logs), "survived_errors": verdict.passed}
    rule, origin = cause.rule, verdict.origin
    return {
        "cause": rule.id if rule else "unknown",
        "category": rule.category if rule else "unknown",
        "title": cause.title,
        "sure": verdict.sure,
        "reasons": list(verdict.reasons),
        "origin": {"rank": origin.rank, "node": origin.node, "process": origin.pid, "actor": origin.actor},
        "evidence": [{"place": location, "text": text} for location, text in verdict.evidence],
        "advice": rule.advice if rule else "",
        "settings": rule.settings if rule and is_coalign_run(logs) else "",
        "others": [
            {"cause": cause.rule.id if cause.rule else "unknown", "title": cause.title, "place": cause.place}
            for cause in verdict.candidates
        ],
        "files": len(logs),
    }


def is_coalign_run(logs: Sequence[LogFile]) -> bool:
    """Whether one of the logs is of Coalign."""
    return any(mark in log.data for log in logs for mark in (b" coalign.", b"/coalign/", b"coalign train"))
