"""Formats errors for the terminal: the message, and the last line of the user's own code in the traceback."""

from __future__ import annotations

from coalign.config.functions import find_last_frame, find_own_frame

_MAX_MESSAGE_LINES = 6


def describe_briefly(error: BaseException, trace: str) -> str:
    """Return an error's message, and the line of the user's own code that raised it: file, number and source.

    ``trace`` is the whole traceback as text, with those of workers and function processes.
    """
    message = f"{type(error).__name__}: {error}".partition("\n\n")[0]  # a WorkerError's text goes on with a traceback
    lines = [line for line in message.splitlines() if line.strip()][:_MAX_MESSAGE_LINES]
    lines += describe_place(trace)
    return "\n".join(
        [*lines, *getattr(error, "__notes__", ()), "`--traceback` shows the whole traceback; log.txt of a run has it"]
    )


def describe_place(trace: str) -> list[str]:
    """Return the last frame of the user's own code in a traceback's text, else its last frame: file and line, source.

    Empty for a text without frames.
    """
    frame = find_own_frame(trace) or find_last_frame(trace)
    if frame is None:
        return []
    location = f"  at {frame.file}:{frame.line}" + (f", in {frame.function}" if frame.function else "")
    return [location, *([f"      {frame.source.strip()}"] if frame.source else [])]
