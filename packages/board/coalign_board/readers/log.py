"""The log of a run, and what its watchdog reported of stalls."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coalign.files import open_regular
from coalign_board.catalog import find_within
from coalign_board.readers import read_count

_MAX_ANSWER_BYTES = 1 << 16
_MOST_STALLS = 100
_MAX_STACK_BYTES = 1 << 20  # sent from a file of stacks


def read_log(folder: Path, params: Mapping[str, str]) -> dict[str, Any]:
    """Return a piece of log.txt in whole lines: its `text`, and the bytes `start` and `end` that it stands between.

    `from`: the piece that begins at this byte, up to 64 KiB; `before`: the piece that ends there. By default the last
    one. `size` is the file's; if it is less than `from`, the log is another one and the piece is its last.
    """
    path = find_within(folder, folder / "log.txt")
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            begin = read_count(params, "from", size + 1)
            goes_on = begin <= size  # the byte is where a line begins
            if goes_on:
                start, end = begin, min(begin + _MAX_ANSWER_BYTES, size)
            else:
                end = min(read_count(params, "before", size), size)
                start = max(0, end - _MAX_ANSWER_BYTES)
            file.seek(start)
            data = file.read(end - start)
    except FileNotFoundError:
        return {"text": "", "start": 0, "end": 0, "size": 0}
    if start and not goes_on:
        skipped = data.find(b"\n") + 1
        start, data = start + skipped, data[skipped:]
    if len(data) < _MAX_ANSWER_BYTES // 2 or b"\n" in data:
        data = data[: data.rfind(b"\n") + 1]
    return {"text": data.decode(errors="replace"), "start": start, "end": start + len(data), "size": size}


def read_stalls(folder: Path, params: Mapping[str, str]) -> dict[str, Any]:
    """Return the reports of the watchdog, the newest first: `time`, `report`, and the names of the files of stacks.

    With `time` and `file`, the text of this file.
    """
    stalls = find_within(folder, folder / "stalls")
    if "file" in params:
        path = find_within(stalls, stalls / params.get("time", "") / params["file"])
        if path.suffix != ".txt" or not path.is_file():
            raise FileNotFoundError(f"there are no stacks '{params['file']}' of {params.get('time', '')}")
        return {"text": _read_start(path)}
    reports = []
    for stall in sorted(stalls.iterdir(), reverse=True)[:_MOST_STALLS] if stalls.is_dir() else ():
        if stall.is_dir() and not stall.is_symlink():
            report = find_within(folder, stall / "report.txt")
            text = _read_start(report) if report.is_file() else ""
            files = sorted(path.name for path in stall.glob("*.txt") if path.name != "report.txt")
            reports.append({"time": stall.name, "report": text, "files": files})
    return {"stalls": reports}


def _read_start(path: Path) -> str:
    with open_regular(path) as file:
        return file.read(_MAX_STACK_BYTES).decode(errors="replace")
