"""Runs untrusted Python in a limited process: no network, no access to this machine's files, bounded time and memory.

Linux only. The layers, each used where the kernel has it: Landlock (files), a seccomp filter (system calls),
namespaces (other processes, network), resource limits, no capabilities, an empty environment, an empty folder, and a
supervisor that kills the job with everything it started. Machines and containers differ in the layers they offer, so
`find_shortfalls` attacks a sandbox and reports what got through.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import sysconfig
import tempfile
from collections.abc import Collection, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

_SUPERVISOR = str(Path(__file__).parent)
_JOB_THREADS = 32
_PATIENCE = 30.0  # seconds beyond a job's own that the supervisor may take to answer
_REPORT_BYTES = 1 << 20  # bytes of a report besides what the job wrote


class SandboxError(RuntimeError):
    """The sandbox itself failed, which says nothing about the code in it."""


class LimitNotEnforceable(RuntimeError):
    """This machine cannot enforce a limit that is required."""

    gives_up = True  # Coalign does not repeat the call


@dataclass(frozen=True)
class SandboxLimits:
    """What one run of code may use."""

    seconds: float = 5.0  # wall-clock time
    memory_mb: int = 512  # address space of each process
    processes: int = 1  # 1: it can start none, but 31 threads; n: processes and threads together
    output_kb: int = 256
    file_mb: int = 16  # all files together; at most 256 of them, in memory, in one folder without sub-folders

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value <= 0:
                raise ValueError(f"the sandbox's {name} is {value}; it must be greater than 0")


@dataclass(frozen=True)
class SandboxResult:
    """How a run ended: ``exit N``, ``signal N``, or the limit it was killed for: ``seconds``, ``output``, ``files``.

    ``answer`` is the token and the values, as a list of literals; empty if the code did not get that far.
    """

    ended: str
    output: str
    answer: str


class Sandbox:
    """A supervisor that runs one piece of code at a time, each in a fresh process: ``async with Sandbox(limits)``.

    ``packages``: installed packages can be imported; otherwise only the standard library.
    """

    def __init__(self, limits: SandboxLimits = SandboxLimits(), *, packages: bool = True) -> None:
        self.limits = limits
        self.packages = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}) if packages else []

    async def __aenter__(self) -> Self:
        if not sys.platform.startswith("linux"):
            raise LimitNotEnforceable(f"the sandbox needs Linux; this is {sys.platform}")
        async with AsyncExitStack() as opened:
            folder = opened.enter_context(
                tempfile.TemporaryDirectory(prefix="coalign-sandbox-", ignore_cleanup_errors=True)
            )
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-s", "-S", "-X", "utf8", _SUPERVISOR),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                cwd=folder,
                env=list_variables(folder),
                start_new_session=True,
                limit=_REPORT_BYTES + 6 * 2 * (self.limits.output_kb << 10),  # JSON writes some characters as six
            )
            assert process.stdin is not None and process.stdout is not None  # both are pipes
            self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
            opened.push_async_callback(self._end)
            paths = {"folder": folder, "packages": self.packages, "readable": [*_runtime(), *self.packages]}
            await self._send(asdict(self.limits) | paths | {"threads": _JOB_THREADS})
            self._opened = opened.pop_all()
        return self

    async def __aexit__(self, type_: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._opened.aclose()

    async def run(self, code: str, *, stdin: str = "", test: str = "", token: str = "") -> SandboxResult:
        """Run ``code`` (Python source), then the statements ``test``, which may call ``__answer__(value)``.

        If they reach their end the answer is ``token`` and the list of these values. Without a test the code is a
        program of its own (``__main__``). Raises SandboxError if the supervisor does not answer.
        """
        task = {"code": code, "stdin": stdin, "test": test, "token": token}
        await self._send(task)
        try:
            line = await asyncio.wait_for(self._stdout.readline(), self.limits.seconds + _PATIENCE)
        except TimeoutError:
            raise SandboxError("the sandbox's supervisor does not answer") from None
        if not line.endswith(b"\n"):
            raise SandboxError("the sandbox's supervisor has ended unexpectedly; its errors are on stderr")
        return SandboxResult(**json.loads(line))

    async def _end(self) -> None:
        """Close the supervisor's input, which makes it end once the job is gone; kill it if it does not."""
        self._stdin.close()
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _PATIENCE)
        finally:
            if self._process.returncode is None:
                self._process.kill()
                await asyncio.shield(self._process.wait())

    async def _send(self, message: Mapping[str, object]) -> None:
        try:
            self._stdin.write(json.dumps(message).encode() + b"\n")
            await self._stdin.drain()
        except ConnectionError:
            raise SandboxError("the sandbox's supervisor has ended unexpectedly; its errors are on stderr") from None


def list_variables(folder: str) -> dict[str, str]:
    """The environment variables of the code. A fixed hash seed makes the order of sets, and so a reward, repeatable."""
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    # One arena, because each more of them takes 64 MB of address space.
    return {"HOME": folder, "TMPDIR": folder, "PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "1", **one_thread}


@cache
def _runtime() -> list[str]:
    paths = sysconfig.get_paths()
    interpreter_paths = {sys.executable, os.path.realpath(sys.executable), paths["stdlib"], paths["platstdlib"]}
    libraries = sysconfig.get_config_var("LIBDIR") or paths["stdlib"]
    return [*sorted(interpreter_paths), libraries, "/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo"]


# The limits by name: code whose function `is_limited` attacks the limit, and what the machine needs to enforce it.
# Where the limit is missing the attack succeeds, so it may hit nothing but its own supervisor, its folder, and PATH.
_FILTER = "a seccomp filter on x86_64 or aarch64"
_REFUSED = """
import ctypes, fcntl, os, signal, socket, struct

def are_refused(*attacks):
    for attack in attacks:
        try:
            attack()
            return False
        except PermissionError:
            pass
    return True
"""
_ATTACKS = {
    "network": (
        """
FAMILIES, DATAGRAM, TIPC = (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX), socket.SOCK_DGRAM, 30

def is_limited():
    return are_refused(
        *(lambda f=f: socket.socket(f, socket.SOCK_STREAM) for f in FAMILIES),
        *(lambda f=f: socket.socket(f, DATAGRAM) for f in FAMILIES),
        lambda: socket.socketpair(socket.AF_UNIX, DATAGRAM),
        lambda: socket.socketpair(TIPC, socket.SOCK_STREAM),
    )
""",
        _FILTER,
    ),
    "files": (
        """
def is_limited():
    return are_refused(*(lambda a=a: open(*a) for a in (
        (PATH, "r"), (PATH, "a"), (PATH + ".new", "w"), ("/proc/self/environ", "r")
    )))
""",
        "Landlock (Linux 5.13 or newer, switched on)",
    ),
    "libraries": (
        """
def is_limited():
    library, lock = open(os.__file__), struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, 0, 0, 0)
    open("own", "w").close()
    libc = ctypes.CDLL(None, use_errno=True)
    return are_refused(
        lambda: os.open("own", os.O_RDONLY | os.O_TRUNC),
        lambda: os.open(PATH, os.O_ACCMODE | os.O_TRUNC),
        lambda: fcntl.flock(library, fcntl.LOCK_EX | fcntl.LOCK_NB),
        lambda: fcntl.fcntl(library, fcntl.F_SETLK, lock),
        lambda: fcntl.fcntl(library, fcntl.F_SETLEASE, fcntl.F_RDLCK),
        lambda: fcntl.ioctl(library, 0x80086601, bytes(8)),  # FS_IOC_GETFLAGS, for all that change a file
    ) and libc.syscall(437, -100, b"own", bytes(24), 24) < 0 and ctypes.get_errno() == 38  # openat2: ENOSYS
""",
        _FILTER,
    ),
    "disk": (
        """
def is_limited():
    files = []
    try:
        for i in range(3):
            files.append(open(str(i), "wb"))
            for _ in range(DISK):
                files[-1].write(bytes(2**20))
            files[-1].flush()
            os.remove(str(i))
    except OSError:
        return True
    return False
""",
        "Landlock (Linux 5.13 or newer, switched on), or mounts in a user namespace",
    ),
    "signals": (
        """
def is_limited():
    read, write = os.pipe()
    parent = os.getppid()
    try:
        os.kill(parent, signal.SIGINT)
    except OSError:
        pass
    return are_refused(
        lambda: fcntl.fcntl(read, fcntl.F_SETOWN, parent),
        lambda: fcntl.fcntl(read, fcntl.F_SETSIG, signal.SIGKILL),
        lambda: fcntl.fcntl(read, 15, struct.pack("ii", 1, parent)),  # F_SETOWN_EX, F_OWNER_PID
        lambda: fcntl.fcntl(read, fcntl.F_NOTIFY, 0),
        *(lambda c=c: fcntl.ioctl(read, c, struct.pack("i", parent)) for c in (0x8901, 0x8902, 0x5452)),
    )
""",  # FIOSETOWN, SIOCSPGRP, FIOASYNC
        _FILTER,
    ),
    "memory": (
        """
def is_limited():
    try:
        bytearray(MEMORY * 2**20)
    except MemoryError:
        return True
    return False
""",
        "RLIMIT_AS",
    ),
    "processes": (
        """
def is_limited():
    import time
    for started in range(PROCESSES + 1):
        try:
            if not os.fork():
                time.sleep(60)
        except OSError:
            return started == PROCESSES - 1
    return False
""",
        "a seccomp filter; for `processes` above 1 also user namespaces and, as root, the right to change user ids",
    ),
    "time": ("while True: pass", "the right to kill its own processes"),
}
REQUIREMENTS = tuple(_ATTACKS)


@cache
def find_shortfalls(processes: int = 1) -> dict[str, str]:
    """The REQUIREMENTS that a sandbox on this machine does not enforce, each with what it would need.

    Attacks sandboxes to find out, which takes part of a second, the first time.
    """
    return asyncio.run(_shortfalls(processes))


async def _shortfalls(processes: int) -> dict[str, str]:
    generous = SandboxLimits(seconds=60.0, memory_mb=256, processes=processes, file_mb=4)
    with tempfile.NamedTemporaryFile(prefix="coalign-secret-") as secret:
        limits = (secret.name, generous.memory_mb, processes, generous.file_mb)
        start = f"PATH, MEMORY, PROCESSES, DISK = {limits!r}{_REFUSED}"
        return {name: needed for name, (_, needed) in _ATTACKS.items() if not await _is_kept(name, start, generous)}


async def _is_kept(name: str, start: str, generous: SandboxLimits) -> bool:
    """Whether a limit holds, against its attack in a sandbox of its own, which must be able to go on afterwards."""
    attack, _ = _ATTACKS[name]
    try:
        if name == "time":
            async with Sandbox(SandboxLimits(seconds=0.2)) as short:
                return (await short.run(attack)).ended == "seconds"
        async with Sandbox(generous) as sandbox:
            answer = (await sandbox.run(start + attack, test="__answer__(is_limited())")).answer
            return answer == "[True]" and (await sandbox.run("")).ended == "exit 0"
    except SandboxError:
        return False


def require_limits(requirements: Collection[str], processes: int = 1) -> None:
    """Raise LimitNotEnforceable for a requirement that this machine does not enforce, ValueError for an unknown one."""
    if unknown := [name for name in requirements if name not in REQUIREMENTS]:
        raise ValueError(f"require: there is no '{unknown[0]}'; there are {', '.join(REQUIREMENTS)}")
    missing = {name: why for name, why in find_shortfalls(processes).items() if name in requirements}
    if missing:
        why = "; ".join(f"{name} (needs {needed})" for name, needed in missing.items())
        left = [name for name in requirements if name not in missing]
        raise LimitNotEnforceable(
            f"code from a model is not run: on this machine the sandbox cannot limit {why}. To run it all the same, on "
            f"a machine that may be lost, ask for less: `require: [{', '.join(left)}]`"
        )
