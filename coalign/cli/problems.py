"""What the command line says of an error that ended a command: the message first, in at most about ten lines."""

from __future__ import annotations

from coalign.report.own_code import describe_place

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
