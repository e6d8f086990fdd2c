"""A linear layer for inference on CPU: its weight packed for the matrix units, rows independent of their batch.

coalign.native.kernels chooses the kernel. On another device, and in a dtype for which there is none, the layer is a
plain nn.Linear. Weights that are not in an nn.Linear (the experts of a mixture, GPT-2's Conv1D) keep transformers'
arithmetic. In these cases log-probs may differ in their last bits from one batch to another (coalign.native.probe).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from coalign.native.kernels import KernelChoice, Product


class Linear(nn.Linear):
    """nn.Linear over 2D or 3D input that computes with a packed copy of its weight between ``pack`` and ``unpack``."""

    product: Product | None = None

    def forward(self, input: Tensor) -> Tensor:
        if self.product is None:
            return F.linear(input, self.weight, self.bias)
        rows = input.reshape(-1, self.in_features)
        return self.product(rows).view(*input.shape[:-1], self.out_features)

    def pack(self, kernel: KernelChoice) -> None:
        """Derive the packed weight from the current one; call again after the weight changed."""
        self.product = kernel.product(self.weight, self.bias)

    def unpack(self) -> None:
        self.product = None


def replace_linears(model: nn.Module) -> list[Linear]:
    """Put a Linear in the place of every nn.Linear of ``model``, around the same parameters; returns them."""
    replaced = []
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            linear = Linear(module.in_features, module.out_features, module.bias is not None, device="meta")
            linear.weight, linear.bias = module.weight, module.bias
            model.set_submodule(name, linear)
            replaced.append(linear)
    return replaced
