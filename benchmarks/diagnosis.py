"""How long diagnosis takes for 100 MB of logs: python benchmarks/diagnosis.py [megabytes]

Two kinds of text: lines of eight healthy ranks that differ in numbers and in words (samples), with one error near the
end; and a log in which every second line looks like an error.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable

from coalign_diagnose.logs import LogFile
from coalign_diagnose.verdict import judge

MEGABYTES = int(sys.argv[1]) if len(sys.argv) > 1 else 100
FAILURE = (
    'Traceback (most recent call last):\n  File "/home/me/train.py", line 7, in main\n    loss.backward()\n'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.11 GiB "
    "of which 1.2 GiB is free.\n"
)


def make(line: Callable[[int, random.Random], str], megabytes: int) -> bytes:
    """Make ten megabytes of lines that all differ, repeated up to the size, and a failure."""
    source = random.Random(1)
    lines, size = [], 0
    while size < min(10, megabytes) * 1_000_000:
        lines.append(line(len(lines), source))
        size += len(lines[-1])
    text = "".join(lines).encode()
    return text * max(1, megabytes // 10) + FAILURE.encode()


def write_healthy(number: int, source: random.Random) -> str:
    stamp = f"2026-03-10 15:{number // 60 % 60:02d}:{number % 60:02d},{number % 1000:03d}"
    if number % 20 == 0:
        words = " ".join(
            "".join(source.choices("abcdefghijklmnopqrstuvwxyz", k=source.randint(2, 9))) for _ in range(40)
        )
        return f"[rank{number % 8}]: {stamp} INFO sample: {words}\n"
    return (
        f"[rank{number % 8}]: {stamp} INFO trainer: step {number} loss {source.random():.4f} grad_norm "
        f"{source.random():.3f} reward {source.random():.3f} tokens/s {source.randint(1000, 9999)}\n"
    )


def write_noisy(number: int, source: random.Random) -> str:
    if number % 2:
        return write_healthy(number, source)
    word = "".join(source.choices("abcdefghijklmnopqrstuvwxyz", k=8))
    return f"(Worker pid={number}) WARNING: request {word} failed with error {number}, retrying\n"


def main() -> None:
    for name, line in {"healthy": write_healthy, "noisy": write_noisy}.items():
        data = make(line, MEGABYTES)
        begun = time.process_time()
        verdict = judge([LogFile("made.log", data)])
        seconds = time.process_time() - begun
        cause = verdict.cause.rule.id if verdict.cause and verdict.cause.rule else None
        print(f"{name}: {len(data) / 1e6:.0f} MB in {seconds:.2f} s of one processor: {cause}")


if __name__ == "__main__":
    main()
