"""What every backend has in common. A backend is a subclass of one of the classes below with a handful of verbs.

This file knows no backend, no algorithm and no Ray. It owns the order of events inside a training step: cut into
updates, count the global denominators, cut into micro-batches, forward and backward, one optimizer step.
"""

from __future__ import annotations

from coalign.config.schema import ModelConfig
from coalign.types import Context


class Module:
    """One process's share of one model."""

    def __init__(self, config: ModelConfig, context: Context) -> None:
        self.config = config
        self.context = context

    def setup(self) -> None:
        """Build or load the model. Called once, in the worker's process, before any other verb."""

    def close(self) -> None:
        """Give back what was taken."""
