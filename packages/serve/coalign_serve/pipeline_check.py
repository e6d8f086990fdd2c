"""What `coalign check` does with the YAML of a pipeline. Checks of runs, which ask first, import nothing for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from coalign.config.layering import read_file
from coalign.report.display import Display


def is_pipeline(path: Path) -> bool:
    """Whether a YAML file describes a pipeline; an unreadable file does not."""
    return "stages" in read_file(path).data


def check(file: Path, overrides: Sequence[str], cluster: str | None, display: Display) -> bool:
    """Check a pipeline; return whether the file is one. Raises what `check_pipeline` raises."""
    if not is_pipeline(file):
        return False
    if cluster:
        raise ValueError(f"--cluster {cluster}: {file} is a pipeline; check the YAML of its training stage")
    from coalign_serve.config.pipeline_file import load_pipeline
    from coalign_serve.pipeline import check_pipeline

    check_pipeline(load_pipeline(file, overrides), display)
    return True
