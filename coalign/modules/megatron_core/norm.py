"""The norm of models whose layers are not Transformer Engine's."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class Norm(nn.Module):
    """An RMSNorm or a LayerNorm, which has a bias. megatron-core's has neither weights less 1 nor sequence parallelism.

    ``affine``: with weights at all. ``epsilon``: in place of what megatron-core says for all norms of a model.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        affine: bool = True,
        epsilon: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.eps, self.shape = (eps if epsilon is None else epsilon), (hidden_size,)
        self.centred, self.less_one = config.normalization == "LayerNorm", config.layernorm_zero_centered_gamma
        initial = torch.zeros(self.shape) if self.less_one else torch.ones(self.shape)
        self.weight = nn.Parameter(initial) if affine else None
        self.bias = nn.Parameter(torch.zeros(self.shape)) if affine and self.centred else None
        for parameter in self.parameters():
            # Ranks have other tokens of a row each: megatron-core sums the gradients of what is marked.
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> the same, in its dtype."""
        weight, given = self.weight, x.dtype
        if self.less_one and weight is not None:  # in float32: bf16 would round what little differs from 1
            weight, x = 1 + weight.float(), x.float()
        if self.centred:
            return F.layer_norm(x, self.shape, weight, self.bias, self.eps).to(given)
        return F.rms_norm(x, self.shape, weight, self.eps).to(given)
