"""Programs of this machine: their whole process group ends in time, and of their output the beginning is kept."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Sequence
from contextlib import suppress

from coalign_graders.sandbox.sandbox import SandboxError

MAX_OUTPUT = 2**20  # bytes of each stream
_SETUP_SECONDS = 600.0  # podman may pull the image
_KILL_SECONDS = 5.0  # in which killed programs close their pipes


class Output:
    """The first bytes of a stream, and how many came after them."""

    def __init__(self, limit: int) -> None:
        self.head, self.cut, self._limit = bytearray(), 0, limit

    async def read(self, stream: asyncio.StreamReader) -> None:
        while chunk := await stream.read(2**16):
            room = self._limit - len(self.head)
            self.head += chunk[:room]
            self.cut += max(0, len(chunk) - room)

    def __str__(self) -> str:
        return self.head.decode(errors="replace") + (f"\n[{self.cut} bytes more]" if self.cut else "")


Outcome = tuple[int | None, Output, Output]  # exit code, output, errors


async def call_program(
    argv: Sequence[str],
    *,
    seconds: float = _SETUP_SECONDS,
    stdin: bytes = b"",
    limit: int = MAX_OUTPUT,
    pass_fds: Sequence[int] = (),
) -> Outcome:
    """Run a program of this machine; its process group is killed after ``seconds``, or if the caller is cancelled."""
    pipe = asyncio.subprocess.PIPE
    folder = tempfile.gettempdir()  # podman leaves a file `oom` where it is called
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, pass_fds=pass_fds, cwd=folder
    )
    assert process.stdin and process.stdout and process.stderr  # all are pipes
    out, err = Output(limit), Output(MAX_OUTPUT)
    work = asyncio.gather(
        _feed(process.stdin, stdin), out.read(process.stdout), err.read(process.stderr), process.wait()
    )
    in_time: set[asyncio.Future] = set()
    try:
        in_time, _ = await asyncio.wait([work], timeout=seconds)
    finally:
        if not in_time:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.wait([work], timeout=_KILL_SECONDS)
            work.cancel()
    return process.returncode if in_time else None, out, err


async def _feed(writer: asyncio.StreamWriter, data: bytes) -> None:
    with suppress(ConnectionError):
        writer.write(data)
        await writer.drain()
    writer.close()


async def require_program(*argv: str, pass_fds: Sequence[int] = ()) -> str:
    """Run a program of this machine and return its output. Raises SandboxError if it fails."""
    code, out, err = await call_program(argv, pass_fds=pass_fds)
    if code != 0:
        raise SandboxError(f"{' '.join(argv[:2])}: {str(err).strip() or 'no answer'}")
    return str(out)
