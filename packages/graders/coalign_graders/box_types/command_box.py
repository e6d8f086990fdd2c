"""What all boxes have in common: commands with limits of time and output, and files that commands read and write."""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath

from coalign_graders.box_types.config import SandboxConfig
from coalign_graders.box_types.network import relay
from coalign_graders.box_types.program import MAX_OUTPUT, Outcome

_MAX_COMMAND = 2**17  # bytes; Linux takes no longer argument
_MAX_CONNECTIONS = 64  # at a time; each takes two descriptors of this process
_ACCESS_SECONDS = 60.0
_OUTSIDE, _MISSING = 97, 98  # exit codes of the scripts
_WRITE = f"""d=$(dirname "$1"); mkdir -p "$d" || exit; [ -L "$1" ] && exit {_OUTSIDE}
case $(realpath "$d")/ in /work/*) exec cat > "$1";; esac; exit {_OUTSIDE}"""
_READ = f"""[ -e "$1" ] || exit {_MISSING}; p=$(realpath "$1")
case $p in /work/*) exec head -c "$2" "$p";; esac; exit {_OUTSIDE}"""


@dataclass(frozen=True)
class BoxResult:
    """How a command ended. ``code``: its exit code, 128 + N for signal N, None if it was stopped after its time."""

    code: int | None
    out: str
    err: str
    timed_out: bool


class CommandBox(ABC):
    """A place in which commands run, with files of its own in /work, where they begin."""

    def __init__(self, config: SandboxConfig, name: str) -> None:
        self.config, self.name = config, name
        self._relays: dict[int, asyncio.Server] = {}
        self._free_connections = asyncio.Semaphore(_MAX_CONNECTIONS)

    async def run(
        self, command: str | Sequence[str], *, seconds: float = 60.0, stdin: bytes = b"", env: Mapping[str, str] = {}
    ) -> BoxResult:
        """Run a program with its arguments, or a text by `sh -c`; after ``seconds`` all of its processes are killed.

        A pipe has the exit code of its last command: that of `pytest | tee log` is always 0. Both streams are returned
        anyway, so run `pytest` alone; or `["bash", "-o", "pipefail", "-c", "pytest | tee log"]`. Of each stream the
        first 2^20 bytes are kept. Raises SandboxError if the box has died.
        """
        words = ["sh", "-c", command] if isinstance(command, str) else command
        encoded = [word.encode(errors="replace") for word in words]  # lone surrogates are not worth an error
        if b"\0" in b"".join(encoded) or sum(map(len, encoded)) >= _MAX_COMMAND:
            return BoxResult(126, "", f"the command has a NUL, or {_MAX_COMMAND} bytes or more", False)
        code, out, err = await self._execute([word.decode() for word in encoded], seconds, stdin, env)
        return BoxResult(code, str(out), str(err), code is None)

    async def write(self, path: str, data: bytes) -> None:
        """Write a file below /work, and the folders that it needs. ValueError for a path that leads out of it."""
        await self._access(_WRITE, path, stdin=data)

    async def read(self, path: str, limit: int = MAX_OUTPUT) -> bytes:
        """The first ``limit`` bytes of a file below /work. FileNotFoundError, or ValueError as for ``write``."""
        return await self._access(_READ, path, limit=limit)

    async def expose(self, port: int) -> str:
        """Let later commands reach 127.0.0.1:``port`` of this machine at the same address, and return it.

        Nothing else of this machine is reached by that. Raises SandboxError if the box's network cannot be entered,
        as without root that of a container of docker.
        """
        connect = partial(relay, port, self._free_connections)
        self._relays[port] = await asyncio.start_server(connect, sock=await self._listen(port))
        return f"127.0.0.1:{port}"

    @abstractmethod
    async def start(self) -> None:
        """Raises SandboxError if nothing can run in the box."""

    @abstractmethod
    async def save(self) -> str:
        """Keep the files, and return the ``image`` of boxes that begin with them. It lasts as long as this process."""

    async def close(self) -> None:
        """End the box with all that runs in it."""
        for server in self._relays.values():
            server.close()

    @abstractmethod
    async def _execute(
        self, argv: list[str], seconds: float, stdin: bytes, env: Mapping[str, str], limit: int = MAX_OUTPUT
    ) -> Outcome: ...

    @abstractmethod
    async def _listen(self, port: int) -> socket.socket: ...

    async def _access(self, script: str, path: str, *, stdin: bytes = b"", limit: int = 0) -> bytes:
        parts, code = PurePosixPath(path).parts, _OUTSIDE
        if parts and parts[0] != "/" and ".." not in parts and "\0" not in path:
            argv = ["sh", "-c", script, "sh", f"./{PurePosixPath(path)}", str(limit)]
            code, out, err = await self._execute(argv, _ACCESS_SECONDS, stdin, {}, limit)
            if code == 0:
                return bytes(out.head)
            if code == _MISSING:
                raise FileNotFoundError(f"the box has no {path!r}")
            if code != _OUTSIDE:
                raise OSError(f"{path!r} in the box: {err if code else 'no answer'}")
        raise ValueError(f"{path!r} leads out of the box's folder")
