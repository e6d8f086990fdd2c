"""A box that is none: commands run on this machine, as this user, and reach all that this user reaches."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from coalign_graders.boxes import BoxResult

_MAX_OUTPUT = 2**20  # bytes of each stream


class HostBox:
    """Runs commands in a folder of its own. For programs that one trusts with this machine, where no box can be had.

    It has the methods of CommandBox; ``passed`` are the names of this process' environment variables that commands get.
    """

    def __init__(self, passed: Sequence[str] = ("PATH", "HOME", "LANG")) -> None:
        self._passed = tuple(passed)
        self._temporary = tempfile.TemporaryDirectory(prefix="coalign-program-")
        self.folder = Path(self._temporary.name)

    async def __aenter__(self) -> HostBox:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._temporary.cleanup)

    async def run(
        self, command: str | Sequence[str], *, seconds: float = 60.0, stdin: bytes = b"", env: Mapping[str, str] = {}
    ) -> BoxResult:
        """Run a program with its arguments, or a text by `sh -c`; its process group is killed after ``seconds``.

        Raises FileNotFoundError for a program that is not there.
        """
        argv = ["sh", "-c", command] if isinstance(command, str) else [*command]
        passed = {name: os.environ[name] for name in self._passed if name in os.environ}
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=pipe, stdout=pipe, stderr=pipe, env={**passed, **env}, cwd=self.folder, start_new_session=True
        )
        work = asyncio.create_task(process.communicate(stdin))
        in_time: set[asyncio.Task[tuple[bytes, bytes]]] = set()
        try:
            in_time, _ = await asyncio.wait({work}, timeout=seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.wait({work}, timeout=5.0)  # a process that has left the group may hold the pipes
            work.cancel()
        out, err = work.result() if work.done() and not work.cancelled() else (b"", b"")
        texts = (text[:_MAX_OUTPUT].decode(errors="replace") for text in (out, err))
        return BoxResult(process.returncode if in_time else None, *texts, timed_out=not in_time)

    async def write(self, path: str, data: bytes) -> None:
        target = self._find(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)

    async def read(self, path: str, limit: int = _MAX_OUTPUT) -> bytes:
        with self._find(path).open("rb") as file:
            return file.read(limit)

    async def expose(self, port: int) -> str:
        return f"127.0.0.1:{port}"

    def _find(self, path: str) -> Path:
        target = (self.folder / path).resolve()
        if not target.is_relative_to(self.folder.resolve()):
            raise ValueError(f"{path!r} leads out of the box's folder")
        return target
