"""The trusted process around untrusted code: runs one job at a time, each in a fresh child, and ends it.

It serves one sample and speaks JSON lines: first the settings, then for each job a line in and a report out. It ends
when its input ends, even during a job. Where the system allows it, it is process 1 of a namespace, which dies as a
whole. Nothing of a job is in its memory before the job arrives, and it never learns the right answers.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import job
import rights
from job import ANSWER

_POLL = 0.01  # seconds between checks of a folder that has no size of its own
_FILES = 256  # the most that a job may have
_NULL = ANSWER + 1
_CALLER = 0  # the file descriptor of its orders


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Python's handler would let a job interrupt process 1
    settings = json.loads(sys.stdin.buffer.readline())
    Path("/proc/self/oom_score_adj").write_text("1000")
    root = os.geteuid() == 0
    alone = rights.take_own_user_id()
    isolated = rights.isolate()
    bounded = isolated and rights.mount_folder(settings["folder"], settings["file_mb"], _FILES)
    rights.die_with_parent(os.pidfd_open(os.getppid()))
    starter = os.pidfd_open(os.getpid())
    if isolated:
        if first := os.fork():
            os.waitpid(first, 0)
            return
        rights.die_with_parent(starter)
    rules = {"counted": alone if root else isolated, "isolated": isolated, "bounded": bounded}
    for line in sys.stdin.buffer:
        report = _run(json.loads(line), settings, rules)
        sys.stdout.write(json.dumps(report) + "\n")
        sys.stdout.flush()


def _run(task: dict[str, Any], settings: dict[str, Any], rules: dict[str, bool]) -> dict[str, Any]:
    """How the job ended (`exit N`, `signal N`, or the limit that it was killed for), its output and its answer."""
    output, answer = os.pipe(), os.pipe()
    stdin, supervisor = _file_of(task["stdin"]), os.pidfd_open(os.getpid())
    child = os.fork()
    if not child:
        rights.die_with_parent(supervisor)
        _connect(stdin, output[1], answer[1])
        job.apply_limits(settings, **rules)
        os.dup2(_NULL, 2)  # until here errors are the supervisor's, and shown
        job.run_code(task, settings["packages"])
        sys.exit()
    for end in (stdin, supervisor, output[1], answer[1]):
        os.close(end)
    written = {output[0]: bytearray(), answer[0]: bytearray()}
    broken = _watch(child, written, settings, bounded=rules["bounded"])
    status = _end(child, rules["isolated"])
    for end in written:
        os.close(end)
    _clear(settings["folder"])
    printed, answered = (data.decode(errors="replace") for data in written.values())
    return {"ended": broken or status, "output": printed, "answer": answered}


def _file_of(text: str) -> int:
    """A file in memory that cannot grow or change, at its beginning."""
    file = os.memfd_create("stdin", os.MFD_ALLOW_SEALING)
    with open(file, "wb", closefd=False) as writer:
        writer.write(text.encode(errors="replace"))
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _connect(stdin: int, output: int, answer: int) -> None:
    """Make these the only open files of this process, besides stderr and the null device; leave the process group."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for source, target in ((stdin, 0), (output, 1), (answer, ANSWER)):
        os.dup2(source, target)
    os.dup2(os.open(os.devnull, os.O_WRONLY), _NULL)
    os.closerange(_NULL + 1, os.sysconf("SC_OPEN_MAX"))
    sys.stdin = sys.__stdin__ = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", encoding="utf-8", closefd=False)


def _watch(child: int, written: dict[int, bytearray], settings: dict[str, Any], *, bounded: bool) -> str | None:
    """Read what the job writes until it ends; the name of the limit that it broke, if any."""
    max_output, deadline = settings["output_kb"] << 10, time.monotonic() + settings["seconds"]
    end, reading = os.pidfd_open(child), list(written)
    try:
        while True:
            left = deadline - time.monotonic()
            pause = left if bounded else min(_POLL, left)
            ready, _, _ = select.select([end, _CALLER, *reading], [], [], max(0.0, pause))
            if _CALLER in ready:  # the caller sends nothing while a job runs, so it has closed or died
                return "abandoned"
            for source in set(ready) - {end}:
                data = os.read(source, 1 << 16)
                written[source] += data
                if not data:
                    reading.remove(source)
            if any(len(data) > max_output for data in written.values()):
                return "output"
            if ready == [end]:  # ended, and everything read
                return None
            if left <= 0:
                return "seconds"
            if not bounded and _is_over_limit(settings["folder"], settings["file_mb"] << 20):
                return "files"
    finally:
        os.close(end)


def _end(child: int, isolated: bool) -> str:
    """Kill the job with everything that it started, and wait until all of it is gone."""
    os.kill(child, signal.SIGKILL)  # not waited for yet, so its number is not reused
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with suppress(ProcessLookupError, ChildProcessError):
        while isolated:  # process 1 inherits, and may kill, all others of its namespace
            os.kill(-1, signal.SIGKILL)
            os.wait()
    return f"exit {status}" if status >= 0 else f"signal {-status}"


def _is_over_limit(folder: str, max_bytes: int) -> bool:
    files = total = 0
    for entry in os.scandir(folder):
        files += 1
        total += entry.stat(follow_symlinks=False).st_size
    return files > _FILES or total > max_bytes


def _clear(folder: str) -> None:
    for entry in os.scandir(folder):
        if not entry.is_dir(follow_symlinks=False):
            os.unlink(entry.path)
