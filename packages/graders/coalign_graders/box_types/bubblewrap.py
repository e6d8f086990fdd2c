"""Boxes of bubblewrap: a folder on this machine, and for each command processes that end with it."""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path

from coalign_graders.box_types.command_box import CommandBox
from coalign_graders.box_types.config import SandboxConfig
from coalign_graders.box_types.network import listen
from coalign_graders.box_types.program import MAX_OUTPUT, Outcome, call_program, require_program
from coalign_graders.sandbox.sandbox import SandboxError

_SYSTEM = ("/usr", "/etc", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
_UNUSED_IDS = range(61184, 65520)  # user ids that systemd reserves for transient services


class BubblewrapBox(CommandBox):
    """System folders read-only, /work and /tmp writable and kept; nothing else of this machine, and nothing runs on."""

    def __init__(self, config: SandboxConfig, name: str) -> None:
        super().__init__(config, name)
        self._folder = Path(tempfile.gettempdir(), name)
        self._namespaces: dict[str, int] = {}  # descriptors, once something is exposed
        # In place of root: who owns no file, and whose processes the kernel counts.
        self._user = str(secrets.choice(_UNUSED_IDS)) if os.geteuid() == 0 else ""

    async def start(self) -> None:
        for folder in (self._folder, self._folder / "work", self._folder / "tmp"):
            folder.mkdir(mode=0o700)
        if self.config.image:
            await require_program("cp", "-a", "--", f"{os.path.abspath(self.config.image)}/.", f"{self._folder}/work")
        await self._give(self._folder)
        code, _, err = await self._execute(["true"], 60.0, b"", {})
        if code != 0:
            raise SandboxError(f"bwrap runs nothing here: {err}")

    async def save(self) -> str:
        image = Path(f"{self._folder}-{secrets.token_hex(4)}")
        image.mkdir(mode=0o700)
        await self._give(image)  # who writes into the box meanwhile could have root follow links
        await require_program(*self._enter(), "cp", "-a", "--", f"{self._folder}/work/.", str(image))
        return str(image)

    async def close(self) -> None:
        await super().close()
        for namespace in self._namespaces.values():
            os.close(namespace)
        await call_program(["rm", "-rf", "--", str(self._folder)])

    async def _give(self, folder: Path) -> None:
        if self._user:
            await require_program("chown", "-hR", f"{self._user}:{self._user}", "--", str(folder))

    async def _listen(self, port: int) -> socket.socket:
        unshare = () if self._namespaces else ("net",) if self._user else ("user", "net")
        listener, made = await listen(port, self._enter(is_trusted=True), unshare)
        self._namespaces |= made
        return listener

    async def _execute(
        self, argv: list[str], seconds: float, stdin: bytes, env: Mapping[str, str], limit: int = MAX_OUTPUT
    ) -> Outcome:
        status, report = os.pipe()
        try:
            argv = [*self._enter(), *self._wrap(env, report), *argv]
            code, out, err = await call_program(argv, seconds=seconds, stdin=stdin, limit=limit, pass_fds=(report,))
        finally:
            os.close(report)
            with open(status, "rb") as file:
                has_ended = b'"exit-code"' in file.read()
        if code is not None and not has_ended:
            raise SandboxError(f"bwrap has died (code {code}): {err}")
        return code, out, err

    def _enter(self, *, is_trusted: bool = False) -> list[str]:
        """The beginning of a command in the box's network, if it has one; without root's rights unless trusted."""
        words = [f"--{name}=/proc/{os.getpid()}/fd/{descriptor}" for name, descriptor in self._namespaces.items()]
        if self._user and not is_trusted:
            words += ["--setuid", self._user, "--setgid", self._user]
        return ["nsenter", *words, *([] if self._user else ["--preserve-credentials"]), "--"] if words else []

    def _wrap(self, env: Mapping[str, str], report: int) -> list[str]:
        memory, file = self.config.memory_mb * 2**20, self.config.file_mb * 2**20
        argv = ["bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"]
        argv += ["--share-net"] if self._namespaces else []
        argv += ["--clearenv", "--cap-drop", "ALL", "--json-status-fd", str(report)]
        for path in filter(os.path.exists, _SYSTEM):
            argv += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]
        argv += ["--dev", "/dev", "--perms", "1777", "--size", str(memory), "--tmpfs", "/dev/shm"]
        argv += ["--remount-ro", "/dev", "--proc", "/proc", "--chdir", "/work"]
        argv += ["--bind", f"{self._folder}/work", "/work", "--bind", f"{self._folder}/tmp", "/tmp"]
        argv += [*self.config.options, "--remount-ro", "/"]
        for name, value in (_ENVIRONMENT | dict(env)).items():
            argv += ["--setenv", name, value]
        limits = [f"--data={memory}", f"--fsize={file}", f"--nproc={self.config.processes}", "--core=0"]
        return [*argv, "--", "prlimit", *limits, "--"]
