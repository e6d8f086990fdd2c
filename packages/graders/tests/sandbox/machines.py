"""Machines of several kinds, as the supervisor of a sandbox finds them, and runs of code on them."""

import asyncio
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from coalign_graders.sandbox import sandbox
from coalign_graders.sandbox.sandbox import Sandbox, SandboxLimits

# On which less can be had: no namespaces (most containers), and no other user ids either (no root).
MACHINES = {
    "everything": "",
    "no namespaces": "rights.isolate = lambda: False",
    "no rights at all": "rights.isolate = rights.take_own_user_id = lambda: False",
}
# Landlock as in Linux 5.13 has no say in signals (6.12), devices (6.10), connections (6.7), and emptied files (6.2).
_OLD = "landlock.find_version = lambda _: 1"
OLD_MACHINES = {
    "old": _OLD,
    "old, no mounts": f"{_OLD}; rights.mount_folder = lambda *_: False",
    **{f"old, {name}": f"{_OLD}; {less}" for name, less in MACHINES.items() if less},
}
PATIENT = SandboxLimits(seconds=120.0)  # for what ends by itself: the machine may be busy


def make_machine(changes, tmp_path, monkeypatch):
    """Have sandboxes begin with these statements about `rights`, `landlock` and `seccomp`; a check of what is left."""
    jail = shutil.copytree(sandbox._SUPERVISOR, tmp_path / "jail", ignore=shutil.ignore_patterns("__pycache__"))
    main = jail / "__main__.py"
    main.write_text(main.read_text().replace("\nmain()", f"\nimport landlock, rights, seccomp\n{changes}\nmain()"))
    monkeypatch.setattr(sandbox, "_SUPERVISOR", str(jail))
    monkeypatch.setattr(tempfile, "tempdir", str(folders := tmp_path / "folders"))
    folders.mkdir()
    before = set(children_of(os.getpid()))  # of other tests in this process
    sandbox.find_shortfalls.cache_clear()

    def check_nothing_is_left():
        sandbox.find_shortfalls.cache_clear()
        assert list(folders.iterdir()) == []
        assert not set(children_of(os.getpid())) - before

    return check_nothing_is_left


def children_of(pid):
    """Of all threads: one that ends meanwhile has handed its children on."""
    children = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            children += map(int, (task / "children").read_text().split())
    return children


def processes_of(pid):
    """The process and all below it; those that end meanwhile are left out."""
    try:
        return [pid, *(one for child in children_of(pid) for one in processes_of(child))]
    except (FileNotFoundError, ProcessLookupError):
        return []


def wait_until_gone(pids):
    for _ in range(500):
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
            return
        time.sleep(0.02)
    pytest.fail(f"still there: {pids}")


def run_all(*jobs, limits=PATIENT, readable=()):
    """The reports of several pieces of code (or dicts of arguments), run one after the other in one sandbox."""

    async def one_by_one():
        box = Sandbox(limits)
        box.packages = [*box.packages, *map(str, readable)]
        async with box:
            return [await box.run(**job) if isinstance(job, dict) else await box.run(job) for job in jobs]

    return asyncio.run(one_by_one())


def run(code, *, limits=PATIENT, readable=(), **asked):
    return run_all({"code": code, **asked}, limits=limits, readable=readable)[0]
