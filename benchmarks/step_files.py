"""The files and lines of Coalign that one training step passes: `python benchmarks/step_files.py run.yaml`.

Overrides (`key=value`) may follow. A profiler notes every function of the package that runs between two steps of a run
in this process. Left out are the engines, data, weight sync, hooks, reports, kernels and the moving of memory, and what
only they call. So the list is what somebody reads who follows a step from the recipe to the gradient.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import coalign

PACKAGE = Path(coalign.__file__).parent
LEFT_OUT = ("backends/engines/", "cpu/", "data/", "weights/", "engine/hooks/", "report/", "memory.py")
KERNELS = ("algorithms/logprobs.py", "backends/attention.py")


class FunctionRecorder(coalign.Hook):
    """Notes functions from the end of step ``first`` to that of the next one."""

    def __init__(self, first: int = 2) -> None:
        self.first = first
        self.noting = False
        self.files: dict[str, set[str]] = {}

    def after_step(self, engine: Any, stats: Any, batch: Any) -> None:
        self.noting = engine.step == self.first

    def note(self, frame: FrameType, event: str, _: object) -> None:
        if self.noting and event == "call":
            own = list(list_callers(frame))
            if own[:1] == [name_file(frame)] and not any(name.startswith((*LEFT_OUT, *KERNELS)) for name in own):
                self.files.setdefault(own[0], set()).add(frame.f_code.co_qualname)


def name_file(frame: FrameType) -> str:
    return frame.f_code.co_filename.removeprefix(f"{PACKAGE}/")


def list_callers(frame: FrameType | None) -> Iterator[str]:
    """The files of the package on the stack of ``frame``, its own first."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(f"{PACKAGE}/"):
            yield name_file(frame)
        frame = frame.f_back


def main() -> None:
    recorder = FunctionRecorder()
    threading.setprofile(recorder.note)
    sys.setprofile(recorder.note)
    try:
        coalign.train(
            sys.argv[1], [*sys.argv[2:], "runtime.cluster=local", "runtime.steps=4"], hooks=[recorder], quiet=True
        )
    finally:
        sys.setprofile(None)
    lines = {file: len((PACKAGE / file).read_bytes().splitlines()) for file in sorted(recorder.files)}
    for file, count in lines.items():
        print(f"{file:32} {count:4} lines, {len(recorder.files[file]):2} functions run")
    print(f"{len(lines)} files, {sum(lines.values()):,} lines")


if __name__ == "__main__":
    main()
