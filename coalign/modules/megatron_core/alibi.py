"""ALiBi (2108.12409): scores lose with the distance of their key, in each head at another pace."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from coalign.weights.families import MegatronConfig


@dataclass(frozen=True)
class Alibi:
    """``slopes`` f32[heads]. ``scale``: of what they make. ``rounded``: that is bf16's, as Falcon computes it."""

    slopes: Tensor
    scale: float = 1.0
    rounded: bool = False

    @classmethod
    def of(cls, model: MegatronConfig) -> Self | None:
        """None for a model that has none."""
        if model.position_embedding_type != "alibi":
            return None
        scaled = model.alibi_scaled
        return cls(slopes(model.num_attention_heads), model.kv_channels**-0.5 if scaled else 1.0, scaled)

    def part(self, index: int, count: int) -> Self:
        """Of the heads that rank ``index`` of ``count`` has."""
        return replace(self, slopes=self.slopes.chunk(count)[index])

    def __call__(self, keys: Tensor) -> Tensor:
        """f32[heads, K]: what is added to the scores of the keys at positions i64[K]."""
        slope = self.slopes.to(keys.device, torch.bfloat16 if self.rounded else torch.float32)
        return (slope[:, None] * keys).float() * self.scale


def slopes(heads: int) -> Tensor:
    """f32[heads]. Of a power of two 2^(-8 i / heads); other numbers of heads take the odd ones of twice the power below
    for the rest."""
    power = 2 ** int(math.log2(heads))
    first = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    return torch.tensor(first + [2 ** (-4 * i / power) for i in range(1, 2 * (heads - power), 2)])
