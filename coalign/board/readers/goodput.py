"""Reads where the time of a run went, step by step: the metrics of coalign.engine.hooks.goodput."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coalign.board.readers.records import read_steps, thin

# From the bottom of the picture to its top; other causes follow.
_ORDER = ("trained", "rollout", "sync", "checkpoint", "evaluation", "hooks", "start", "restart", "redone")


def read_goodput(folder: Path, params: Mapping[str, str]) -> dict[str, Any]:
    """Return `shares` of the run's wall time by cause, and `dropped` tokens as shares of those generated.

    Both are lists over `steps`, each of the run so far; `seconds` is the wall time. The meaning of each cause is in
    docs/observability.md.
    """
    rows = [row for row in read_steps(folder / "metrics.jsonl", "goodput/", "tokens_dropped/", "time/run")]
    rows = thin([row for row in rows if any(name.startswith("goodput/") for name in row)])
    return {
        "steps": [row["step"] for row in rows],
        "seconds": [row.get("time/run") for row in rows],
        "shares": _collect(rows, "goodput/"),
        "dropped": _collect(rows, "tokens_dropped/"),
    }


def _collect(rows: list[dict[str, Any]], prefix: str) -> dict[str, list[float]]:
    """Return the metrics with a prefix as lists over the rows, 0 where a row lacks one."""
    causes = {name.removeprefix(prefix) for row in rows for name in row if name.startswith(prefix)}
    order = [cause for cause in _ORDER if cause in causes] + sorted(causes.difference(_ORDER))
    return {cause: [row.get(prefix + cause, 0.0) for row in rows] for cause in order}
