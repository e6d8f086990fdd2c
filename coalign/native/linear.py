"""A linear layer for inference on CPU: weights prepacked for the matrix units, rows independent of their batch.

A matrix product may round a row differently when the number of rows changes, because the library picks another kernel
or another split of the inner sum. Then a sampled token would depend on what else is in the batch. The two kernels used
here do not (measured, see docs/lab.md; tests/native/test_invariance.py holds it):

- float32: MKL's packed sgemm gives a row the same bits in any position, with any number of rows except one, and with
  one thread or two;
- bfloat16: oneDNN's prepacked product is called on tiles of exactly ``TILE`` rows, so its shape never changes.

Without these kernels (another device, no MKL) the layer is a plain nn.Linear. Weights that are not in an nn.Linear
(the experts of a mixture, GPT-2's Conv1D) keep transformers' arithmetic. In both cases log-probs may differ in their
last bits from one batch to another.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TILE = 64
ROWS = 8  # the engine computes multiples of this many rows: never one, and no vector loop ends inside a row


class Linear(nn.Linear):
    """nn.Linear over 2D or 3D input that computes with a packed copy of its weight between ``pack`` and ``unpack``."""

    product: Callable[[Tensor], Tensor] | None = None

    def forward(self, input: Tensor) -> Tensor:
        if self.product is None:
            return F.linear(input, self.weight, self.bias)
        rows = input.reshape(-1, self.in_features)
        return self.product(rows).view(*input.shape[:-1], self.out_features)

    def pack(self) -> None:
        """Derive the packed weight from the current one; call again after the weight changed."""
        if self.weight.device.type != "cpu":
            return
        if self.weight.dtype == torch.float32 and torch.backends.mkl.is_available():
            self.product = _mkl_product(self.weight, self.bias)
        elif self.weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            self.product = _onednn_product(self.weight, self.bias)

    def unpack(self) -> None:
        self.product = None


def _mkl_product(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, TILE)
    # The last argument is the row count the weight was packed for; anything else than the actual one makes the
    # operator fall back to an unpacked product. MKL itself takes any row count.
    return lambda rows: torch.ops.mkl._mkl_linear(rows, packed, weight, bias, len(rows))


def _onednn_product(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, TILE)

    def product(rows: Tensor) -> Tensor:
        count = len(rows)
        tiles = F.pad(rows, (0, 0, 0, -count % TILE)).split(TILE)
        out = [torch.ops.mkldnn._linear_pointwise(tile, packed, bias, "none", [], "") for tile in tiles]
        return torch.cat(out)[:count] if len(out) > 1 else out[0][:count]

    return product


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
