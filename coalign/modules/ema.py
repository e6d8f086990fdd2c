"""A moving average of a model's weights, kept in float32 beside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Average:
    """average = decay * average + (1 - decay) * weights, after each optimizer step, from the weights as they start.

    Of the parameters that require a gradient; each average lies where its parameter does, and is sharded like it. Kept
    in float32, whatever the weights are: at decay 0.999 a step adds less than bfloat16 can hold.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.tensors: dict[str, Tensor] = {name: p.detach().float().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights of this moment into the average."""
        for name, p in self.parameters.items():
            self.tensors[name].lerp_(p.float(), 1.0 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside of the block the model has the average as its weights; afterwards its own again, bit for bit."""
        own = {name: p.detach().clone() for name, p in self.parameters.items()}
        self._set(self.tensors)
        try:
            yield
        finally:
            self._set(own)

    @torch.no_grad()
    def _set(self, values: dict[str, Tensor]) -> None:
        for name, p in self.parameters.items():
            p.copy_(values[name])
