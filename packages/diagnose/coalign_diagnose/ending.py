"""What a run adds to its error when it ends badly: the cause, what to do, and the command that shows more."""

from __future__ import annotations

import logging
import traceback
from pathlib import Path

from coalign_diagnose.logs import LogFile
from coalign_diagnose.verdict import judge

log = logging.getLogger(__name__)

# Errors of these categories say themselves what is wrong, and where.
_PLAIN = ("user code", "configuration", "data", "effects", "scheduler", "rewards")
_MAX_LOG_BYTES = 1 << 20  # read from the end of log.txt


def explain_ending(error: BaseException, folder: Path) -> str | None:
    """Return at most three lines about an error, None if no rule is certain of its cause or the error says as much.

    It never raises.
    """
    try:
        return _explain(error, folder)
    except Exception as problem:
        log.debug("no diagnosis: %s", problem)
        return None


def _explain(error: BaseException, folder: Path) -> str | None:
    source = getattr(error, "cause", None) or error  # a worker's error carries what was raised there
    if not isinstance(error, Exception) or (type(source).__module__.startswith("coalign") and source is not error):
        return None
    if type(error).__module__.startswith("coalign") and not hasattr(error, "failure"):
        return None  # Coalign's own errors say what is wrong and what to do
    logs = [LogFile("error", "".join(traceback.format_exception(error)).encode())]
    file = folder / "log.txt"
    if file.exists():
        logs.append(LogFile(str(file), file.read_bytes()[-_MAX_LOG_BYTES:]))
    verdict = judge(logs)
    cause = verdict.cause
    if cause is None or cause.rule is None or verdict.sure != "certain" or cause.rule.category in _PLAIN:
        return None
    settings = f" Settings: {cause.rule.settings}" if cause.rule.settings else ""
    return f"cause: {cause.title}\ndo: {cause.rule.advice}{settings}\n`coalign diagnose {folder}` shows more"
