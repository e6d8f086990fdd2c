"""What a person is shown of an error: its message, and the place in their own code that its traceback ends in."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

_FRAME = re.compile(r'^ *File "(.+?)", line (\d+)(?:, in (.+))?\n(?: +(?! *File ")(.+))?', re.MULTILINE)
_PACKAGE = str(Path(__file__).resolve().parents[1])
_MOST_LINES = 6  # of a message


def describe_briefly(error: BaseException, trace: str) -> str:
    """Return an error's message, and where people's own code raised it: file, line and source line.

    ``trace`` is the whole traceback as text, with those of workers and of processes of functions.
    """
    message = f"{type(error).__name__}: {error}".partition("\n\n")[0]  # a WorkerError's text goes on with a traceback
    lines = [line for line in message.splitlines() if line.strip()][:_MOST_LINES]
    lines += describe_place(trace)
    return "\n".join(
        [*lines, *getattr(error, "__notes__", ()), "`--traceback` shows the whole traceback; log.txt of a run has it"]
    )


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
