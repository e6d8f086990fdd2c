"""The few constants of the physics, each with its meaning, and the file that replaces them by a machine's own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """Efficiencies and fixed costs of devices; ``coalign plan --measure`` replaces them by measured ones."""

    matmul: float = 0.75
