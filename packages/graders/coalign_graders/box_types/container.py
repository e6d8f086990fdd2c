"""Boxes of podman and docker, by their command lines."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import tempfile
from collections.abc import Mapping

from coalign_graders.box_types.command_box import CommandBox
from coalign_graders.box_types.network import listen
from coalign_graders.box_types.program import MAX_OUTPUT, Outcome, call_program, require_program
from coalign_graders.sandbox.sandbox import SandboxError

LABEL = "coalign-box"
_LIFETIME = "86400"  # seconds after which a container of a dead run ends by itself


class ContainerBox(CommandBox):
    """A container. What a command leaves running runs on, until the box ends or a command is stopped."""

    async def start(self) -> None:
        config, memory = self.config, f"{self.config.memory_mb}m"
        argv = ["run", "-d", "--name", self.name, "--label", LABEL, "--entrypoint", "sleep", "--stop-signal", "KILL"]
        argv += ["--log-driver", "none", "--network", "bridge" if config.network else "none", "--memory", memory]
        argv += ["--memory-swap", memory, "--pids-limit", str(config.processes), "--cap-drop", "ALL"]
        argv += ["--security-opt", "no-new-privileges", *(["--cpus", str(config.cpus)] if config.cpus else [])]
        for name, limit in {"nofile": 4096, "nproc": 4096, "core": 0, "fsize": config.file_mb * 2**20}.items():
            argv += ["--ulimit", f"{name}={limit}:{limit}"]
        await self._do(*argv, *config.options, config.image or "", _LIFETIME)
        with tempfile.TemporaryDirectory() as folder:  # `mkdir` in the box may lack the right, or be somebody's program
            os.chmod(folder, 0o777)
            await self._do("cp", f"{folder}/.", f"{self.name}:/work")

    async def save(self) -> str:
        image = f"localhost/{self.name}-{secrets.token_hex(4)}"
        await self._do("commit", self.name, image)
        return image

    async def close(self) -> None:
        await super().close()
        await call_program([self.config.type, "rm", "-f", self.name])

    async def _do(self, *arguments: str) -> str:
        return await require_program(self.config.type, *arguments)

    async def _inspect(self, field: str) -> str:
        return (await self._do("inspect", "-f", f"{{{{.State.{field}}}}}", self.name)).strip()

    async def _listen(self, port: int) -> socket.socket:
        folder = f"/proc/{await self._inspect('Pid')}/ns"
        user = [f"--user={folder}/user", "--preserve-credentials"] if os.geteuid() != 0 else []
        listener, _ = await listen(port, ["nsenter", f"--net={folder}/net", *user, "--"])
        return listener

    async def _execute(
        self, argv: list[str], seconds: float, stdin: bytes, env: Mapping[str, str], limit: int = MAX_OUTPUT
    ) -> Outcome:
        variables = [f"--env={name}={value}" for name, value in env.items()]
        argv = [self.config.type, "exec", "-i", *variables, "-w", "/work", self.name, *argv]
        try:
            code, out, err = await call_program(argv, seconds=seconds, stdin=stdin, limit=limit)
        except asyncio.CancelledError:
            await self._stop()
            raise
        if code is None:
            await self._stop()
        elif code != 0 and await self._inspect("Running") != "true":
            raise SandboxError(f"the box has died: {err}")
        return code, out, err

    async def _stop(self) -> None:
        """Kill all processes in the box: they outlive the `exec` that began them, and may ignore signals."""
        await self._do("restart", self.name)
        for port, server in list(self._relays.items()):
            server.close()
            await self.expose(port)  # the network is a new one
