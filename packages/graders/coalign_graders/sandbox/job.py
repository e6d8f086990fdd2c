"""One run of untrusted code in a process of its own: first the limits, then the code, then the question about it.

A job has ``code`` (Python source) and perhaps ``test``, statements that run after it. If these reach their end the
answer is ``token`` and a list of the values, as literals, that they passed to ``ANSWER_NAME``. Without a test the code
is a program, judged by its output.
"""

from __future__ import annotations

import builtins
import os
import resource
import site
import sys
from types import ModuleType
from typing import Any

import landlock
import rights
import seccomp

ANSWER = 3  # the file descriptor of answers
ANSWER_NAME = "__answer__"  # the function by which a test hands over a value
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random", "/etc/ld.so.cache", "/etc/localtime")
_HELPERS = ("supervisor", "job", "landlock", "rights", "seccomp")


def apply_limits(settings: dict[str, Any], *, counted: bool, isolated: bool, bounded: bool) -> None:
    """Take away every right that the job does not need, as far as this kernel can.

    ``counted``: RLIMIT_NPROC counts this job alone. ``isolated``: process 1 of a namespace supervises it. ``bounded``:
    its folder has a fixed size. In any other folder files cannot be removed: open ones would still take their space.
    """
    seconds, memory = settings["seconds"], settings["memory_mb"] << 20
    limits = {
        resource.RLIMIT_CPU: int(seconds) + 2,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: settings["file_mb"] << 20,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    fork = settings["processes"] > 1
    if counted:  # the supervisor's own processes count too
        limits[resource.RLIMIT_NPROC] = 2 + (settings["processes"] if fork else settings["threads"])
    for resource_id, limit in limits.items():
        resource.setrlimit(resource_id, (limit, limit))
    os.chdir(settings["folder"])
    landlock.apply(readable=[*_DEVICES, *settings["readable"]], writable=[settings["folder"]], removable=bounded)
    rights.drop_capabilities()
    # Only a process namespace dies as a whole; without one, a started process could outlive the job.
    seccomp.apply(fork=fork and isolated and counted, threads=counted, unnamed=bounded)


def run_code(job: dict[str, Any], packages: list[str]) -> None:
    """Run the code as Python would. The process ends with it: SystemExit and errors are not caught.

    What the harness needs is compiled and bound before the code runs, and the test sees built-ins as they were then.
    """
    for name in _HELPERS:
        sys.modules.pop(name, None)
    sys.path[:] = sys.path[1:] + packages
    sys.argv = ["solution.py"]
    for add_builtins in (site.setquit, site.setcopyright, site.sethelper):  # `-S` leaves out exit, quit, help and such
        add_builtins()
    test = compile(job["test"], "test.py", "exec") if job["test"] else None
    module = ModuleType("solution" if test else "__main__")
    sys.modules["__main__"] = sys.modules[module.__name__] = module
    execute, write, leave, names, answers = exec, os.write, os._exit, module.__dict__, []
    original_builtins = dict(vars(builtins))
    execute(compile(job["code"], "solution.py", "exec"), names)
    if test:
        names |= {"__builtins__": original_builtins, ANSWER_NAME: lambda value: answers.append(repr(_plain(value)))}
        execute(test, names)
        data = f"{job['token']}[{', '.join(answers)}]".encode()
        while data:
            data = data[write(ANSWER, data) :]
        leave(0)


def _plain(value: Any) -> Any:
    """Containers and NumPy values as built-in ones, so that their repr is a literal."""
    if isinstance(value, dict):
        return {_plain(key): _plain(one) for key, one in value.items()}
    for type_ in (list, tuple):
        if isinstance(value, type_):
            return type_(map(_plain, value))
    if isinstance(value, (set, frozenset)):
        return set(map(_plain, value))
    scalars: tuple[Any, ...] = (bool, int, float, str, bytes)
    for type_ in scalars:
        if isinstance(value, type_):
            return type_(value)
    return value.tolist() if hasattr(value, "tolist") else value
