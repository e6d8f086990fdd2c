"""Operations alone whose result does not depend on the order of threads, in all of a process."""

from __future__ import annotations

import os

import torch


def enforce(**libraries: str) -> None:
    """From now on; an operation that has no such way ends the run. ``libraries``: what further ones are told, by the
    environment."""
    for name, value in {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **libraries}.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
