"""Compiles kernels.cpp with the machine's C++ compiler when it is first needed, and loads the result.

The library stays in the cache directory, under a name made of all that decides how it computes: the source, the
compiler, its options and the processor. So all processes and later runs on such a machine compute alike.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch  # noqa: F401 (its OpenMP library is the one that the kernels use)

from coalign.files import find_cache
from coalign.processes.host import describe_processor, find_compiler

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.cpp")
OPTIONS = ("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
SECONDS = 120  # that the compiler may take
# What torch restricts itself to is a restriction for these kernels, too.
CAPABILITIES = {"default": ["-march=x86-64-v2"], "avx2": ["-march=x86-64-v3"]}


@cache
def load_kernels() -> ctypes.CDLL | None:
    """Return the compiled kernels, or None where they cannot be compiled."""
    compiler = find_compiler()
    if compiler is None:
        log.info("no C++ compiler was found: attention and log-probs on the CPU take longer")
        return None
    options = [*OPTIONS, *choose_architecture()]
    key = "\n".join([SOURCE.read_text(), *compiler, *options, *describe_processor()])
    library = find_cache() / "kernels" / f"cpu-{hashlib.sha256(key.encode()).hexdigest()[:24]}.so"
    try:
        if not library.exists():
            library.parent.mkdir(parents=True, exist_ok=True)
            with open(library.with_suffix(".lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # the processes of a machine begin together: one of them compiles
                if not library.exists():
                    _compile(compiler, options, library)
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError) as problem:
        detail = getattr(problem, "stderr", None) or problem
        log.warning("the kernels for CPUs were not compiled, attention and log-probs take longer: %s", detail)
        return None


def choose_architecture() -> list[str]:
    """Return the compiler's options for this processor's instructions."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return ["-mcpu=native"]
    if restricted := CAPABILITIES.get(os.environ.get("ATEN_CPU_CAPABILITY", "").lower()):
        return restricted
    return ["-march=native", "-mprefer-vector-width=512"]


def _compile(compiler: list[str], options: list[str], library: Path) -> None:
    """Raises OSError, or SubprocessError with what the compiler said."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        object_file, made = Path(folder, "kernels.o"), Path(folder, library.name)
        compile_ = [*compiler, *options, "-c", str(SOURCE), "-o", str(object_file)]
        # Linked without -fopenmp: its functions are those of the OpenMP library that torch has loaded. With another one
        # beside it there would be twice as many threads as processors.
        for command in (compile_, [*compiler, "-shared", str(object_file), "-o", str(made)]):
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)
        made.replace(library)
