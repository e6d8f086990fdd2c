"""The newest samples of a run, for the head of its page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coalign.board.catalog import find_within
from coalign.board.readers import read_count
from coalign.run_files.records import parse_record, read_end

_BYTES = 1 << 18  # of the end of samples.jsonl
_MOST = 50
_LONGEST = 2000  # characters of a prompt or response that are sent
_KEYS = ("step", "phase", "group", "index", "prompt", "response", "reward", "rewards", "status")


def read_newest_samples(folder: Path, params: Mapping[str, str]) -> dict[str, Any]:
    """Return the `last` samples (default 4), the newest first, their texts cut after 2,000 characters."""
    count = min(read_count(params, "last", 4), _MOST)
    records = []
    complete = read_end(find_within(folder, folder / "samples.jsonl"), _BYTES).split(b"\n")[:-1]
    for line in reversed(complete):
        if len(records) == count:
            break
        if record := parse_record(line):
            shown = {key: record.get(key) for key in _KEYS}
            records.append({k: v[:_LONGEST] if isinstance(v, str) else v for k, v in shown.items()})
    return {"samples": records}
