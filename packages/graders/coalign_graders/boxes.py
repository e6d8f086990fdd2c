"""Boxes in which strangers' commands run: bubblewrap, podman or docker by their command lines, or a class of your own.

    async with open_sandbox({"type": "bwrap"}) as box:
        result = await box.run("pytest -q", seconds=60)

This machine passes lists of arguments, no line to a shell, and opens no file of a box: `read` and `write` are commands
in it, so they reach what its commands reach. What a command causes is a BoxResult. A box that does not start, or dies,
raises SandboxError, which says nothing about who used it. The next run removes what a killed one has left. Linux only.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import zlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from coalign_graders.box_types.bubblewrap import BubblewrapBox
from coalign_graders.box_types.command_box import BoxResult, CommandBox
from coalign_graders.box_types.config import SandboxConfig
from coalign_graders.box_types.container import LABEL, ContainerBox
from coalign_graders.processors import count_processors
from coalign_graders.sandbox.sandbox import SandboxError

__all__ = ["BoxResult", "CommandBox", "SandboxConfig", "SandboxError", "open_sandbox"]

_PACKAGES = {"bwrap": "bubblewrap, 0.8 or newer", "podman": "podman", "docker": "docker.io"}
_starts: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


@asynccontextmanager
async def open_sandbox(config: SandboxConfig | Mapping[str, Any]) -> AsyncIterator[CommandBox]:
    """Start a box, and end it with all that runs in it. As many start at a time as there are processors.

    Raises ValueError for a mapping that is no SandboxConfig, SandboxError if the box does not start.
    """
    config = config if isinstance(config, SandboxConfig) else SandboxConfig.model_validate(dict(config))
    if ":" in config.type:
        module, _, name = config.type.partition(":")
        settings = config.model_dump(exclude_unset=True, exclude={"type"})
        async with getattr(importlib.import_module(module), name)(**settings) as box:
            yield box
        return
    if shutil.which(config.type) is None:
        raise SandboxError(f"there is no '{config.type}' on this machine; install {_PACKAGES[config.type]}")
    box_type = BubblewrapBox if config.type == "bwrap" else ContainerBox
    box = box_type(config, f"{_name_run(os.getpid())}-{secrets.token_hex(4)}")
    try:
        async with _starts.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(count_processors())):
            await asyncio.to_thread(_reap, config.type)
            await box.start()
        yield box
    finally:
        await asyncio.shield(box.close())


def _name_run(process: int) -> str:
    """`coalign-HOST-PROCESS-START`; a later process of the same number has another start. Raises FileNotFoundError."""
    start = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    return f"coalign-{zlib.crc32(socket.gethostname().encode()):08x}-{process}-{start}"


def _has_ended(name: str) -> bool:
    """Whether the run that named a box or image was on this machine, and has ended."""
    parts = re.fullmatch(r"(?:.*/)?coalign-([0-9a-f]{8})-([0-9]+)-[0-9]+-[-0-9a-f]+", name)
    if parts is None or parts[1] not in _name_run(os.getpid()):
        return False
    try:
        return f"{_name_run(int(parts[2]))}-" not in name
    except FileNotFoundError:
        return True


@cache
def _reap(program: str) -> None:
    """Remove boxes and images of runs that have ended: once in a process."""

    def list_names(*arguments: str) -> list[str]:
        return subprocess.run([program, *arguments], capture_output=True, text=True).stdout.split()

    if program == "bwrap":
        leftovers = {("rm", "-rf", "--"): list(map(str, Path(tempfile.gettempdir()).glob("coalign-*-*-*-*")))}
    else:
        images = list_names("images", "--filter", "reference=localhost/coalign-*", "--format", "{{.Repository}}")
        boxes = list_names("ps", "-a", "--filter", f"label={LABEL}", "--format", "{{.Names}}")
        leftovers = {(program, "rm", "-f"): boxes, (program, "rmi"): images}
    for remove, names in leftovers.items():
        if dead := [name for name in names if _has_ended(name)]:
            subprocess.run([*remove, *dead], capture_output=True)
