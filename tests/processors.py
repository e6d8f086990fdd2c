"""`python -m tests.processors [NAME …]`: the numeric tests as other processors would compute them

torch, oneDNN and MKL choose their kernels by what the processor says that it can do; these variables make it say less.
Of a processor that has no more than that itself, an emulation changes nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys

EMULATIONS = {
    "without AVX-512": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "without vectors in torch": {"ATEN_CPU_CAPABILITY": "default"},
    "MKL for any processor": {"MKL_CBWR": "COMPATIBLE"},
    "the least of all three": {
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_CBWR": "COMPATIBLE",
    },
}
NUMERIC = [*(f"tests/{room}" for room in ("algorithms", "backends", "conformance", "golden")), "packages/cpu/tests"]
MARKED = "not backends and not gpu and not device and (not slow or processors)"


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """pytest in a process of its own, which chooses its own kernels."""
    environment = {key: value for key, value in os.environ.items() if key != "COALIGN_CACHE"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        env=environment | EMULATIONS[name],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def main() -> None:
    failed = []
    for name in sys.argv[1:] or EMULATIONS:
        done = run(name, "--numprocesses=auto", "--maxprocesses=8", "--dist=worksteal", "-m", MARKED, *NUMERIC)
        sys.stdout.write(f"== {name}\n{done.stdout}\n")
        if done.returncode:
            failed.append(name)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
