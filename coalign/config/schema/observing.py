"""What a run tells of itself besides metrics."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from coalign.config.schema.base import Section


class ProfileConfig(Section):
    """Traces of some steps, by every process of some models, in `profile/step_N/` of the run folder."""

    steps: list[PositiveInt]
    """Those to trace, counted from 1. A trace of one step may have a hundred MB."""
    models: list[str] = []
    """None: all of them."""
    tool: Literal["torch", "nsys"] = "torch"
    """`torch`: a file for Perfetto from each process. `nsys`: NVTX ranges, between cudaProfilerStart and -Stop, for
    runs under `nsys profile --capture-range=cudaProfilerApi`."""
    memory: bool = False
    """Also every allocation."""
    stacks: bool = False
    """Also the Python line that each operation comes from (slow)."""
    shapes: bool = False
    """Also the shapes of what operations get."""
