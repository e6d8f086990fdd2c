"""What one worker does, for a profiler: torch's own, or ranges that nsys shows."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from coalign.config.schema import ProfileConfig


class Tracer:
    """At most one trace at a time. The calls of the worker are ranges in it (`train_step`)."""

    def __init__(self) -> None:
        self._tool = ""  # of the trace under way
        self._profile: torch.profiler.profile | None = None

    def start(self, config: ProfileConfig, step: int) -> None:
        """Begin the trace of a step. torch traces one process once at a time. ValueError for `nsys` without CUDA."""
        if config.tool == "nsys":
            if not torch.cuda.is_available():
                raise ValueError(
                    "runtime.profile.tool: `nsys` shows CUDA devices, and this process has none; use `torch`"
                )
            torch.cuda.profiler.start()  # `nsys profile --capture-range=cudaProfilerApi` begins here
            torch.cuda.nvtx.range_push(f"step {step}")
        else:
            self._profile = torch.profiler.profile(
                profile_memory=config.memory, with_stack=config.stacks, record_shapes=config.shapes
            )
            self._profile.start()
        self._tool = config.tool

    def stop(self, file: Path) -> None:
        """End the trace; that of torch goes to ``file`` (Chrome trace format; Perfetto opens it)."""
        tool, self._tool = self._tool, ""
        if tool == "nsys":
            torch.cuda.nvtx.range_pop()
            torch.cuda.profiler.stop()
        elif tool:
            self._profile.stop()
            file.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(file))
            self._profile = None

    def range(self, name: str) -> AbstractContextManager[object]:
        """What happens inside is shown under this name."""
        if torch.autograd._profiler_enabled():
            return torch.profiler.record_function(name)
        return torch.cuda.nvtx.range(name) if self._tool else nullcontext()
