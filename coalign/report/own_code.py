"""Finds the place in people's own code that a traceback ends in."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

_FRAME = re.compile(r'^ *File "(.+?)", line (\d+)(?:, in (.+))?\n(?: +(?! *File ")(.+))?', re.MULTILINE)
_PACKAGE = str(Path(__file__).resolve().parents[1])


def describe_place(trace: str) -> list[str]:
    """Return the last frame of people's own code in a traceback's text, else its last frame: file and line, source.

    Empty for a text without frames.
    """
    frames = _FRAME.findall(trace)
    own = [frame for frame in frames if _is_own(frame[0])]
    lines = []
    for file, line, function, source in own[-1:] or frames[-1:]:
        lines.append(f"  at {file}:{line}" + (f", in {function}" if function else ""))
        lines += [f"      {source.strip()}"] if source else []
    return lines


def _is_own(file: str) -> bool:
    """Whether a file is neither Coalign's nor an installed package's nor Python's."""
    installed = (_PACKAGE, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), "<")
    return not file.startswith(installed) and "site-packages" not in file
