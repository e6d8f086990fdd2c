"""The examples of rules, and how they become logs."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from coalign_diagnose.logs import LogFile
from coalign_diagnose.verdict import RunDiagnosis, judge

EXAMPLES = yaml.safe_load(Path(__file__).with_name("examples.yaml").read_text(encoding="utf-8"))
_SHORT = re.compile(r"^T\((.+?), (\w+), (.+)\)$", re.MULTILINE)
BEFORE = (
    "2026-03-10 11:00:00,000 INFO loading the model\n"
    "2026-03-10 11:01:00,000 INFO step 1 loss 2.31 reward 0.1 lr 1e-6\n"
    "2026-03-10 11:02:00,000 INFO step 2 loss 2.30 reward 0.1 lr 1e-6\n"
)


def spell_out(text: str) -> str:
    """Write `T(file, function, source)` as a traceback."""
    return _SHORT.sub(r'Traceback (most recent call last):\n  File "\1", line 12, in \2\n    \3', text)


def judge_text(text: str, name: str = "run.log") -> RunDiagnosis:
    return judge([LogFile(name, text.encode(), 2026)])


def name_cause(verdict: RunDiagnosis) -> str | None:
    """The id of the cause; `unknown`; None if nothing failed."""
    if verdict.cause is None:
        return None
    return verdict.cause.rule.id if verdict.cause.rule else "unknown"
