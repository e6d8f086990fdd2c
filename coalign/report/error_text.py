"""What a person is shown of an error: its message, and the place in their own code that its traceback ends in."""

from __future__ import annotations

from coalign.config.functions import find_last_frame, find_own_frame

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
    frame = find_own_frame(trace) or find_last_frame(trace)
    if frame is None:
        return []
    place = f"  at {frame.file}:{frame.line}" + (f", in {frame.function}" if frame.function else "")
    return [place, *([f"      {frame.source.strip()}"] if frame.source else [])]
