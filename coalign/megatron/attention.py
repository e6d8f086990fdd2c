"""Attention of megatron-core's layers over packed rows: the kernel of coalign.modules.attention in its place.

So prompts that several sequences continue are computed once, with every backend alike, and context parallelism is a
change of heads (Ulysses) that needs no Transformer Engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from coalign.modules.attention import attend
from coalign.modules.layout import Block
from coalign.modules.parallel.rows import Heads


@dataclass(frozen=True, slots=True)
class Packed:
    """What attention has to know of a row. megatron-core hands it through, recomputation included, as it would its own
    parameters of packed sequences. ``positions`` i64[P]: of this rank's part of the row."""

    positions: Tensor
    blocks: tuple[Block, ...]
    heads: Heads | None = None

    qkv_format: ClassVar[str] = "blocks"  # none of those that megatron-core treats in some way of its own


class PackedAttention(nn.Module):
    """query [P, 1, heads, D], key [P, 1, groups, D] and value [P, 1, groups, E] -> [P, 1, heads · E]."""

    def __init__(self, config: Any, layer_number: int, *, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scaling = softmax_scale
        self.window = None if config.window_size is None else config.window_size[0] + 1

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: Packed,
        **_: Any,
    ) -> Tensor:
        packed = packed_seq_params
        states = [x[:, 0] for x in (query, key, value)]
        if packed.heads is not None:
            states = [packed.heads.taken(x.transpose(0, 1)[None])[0].transpose(0, 1) for x in states]
        out = attend(*states, blocks=packed.blocks, scaling=self.scaling, window=self.window)
        if packed.heads is not None:
            out = packed.heads.given_back(out[None])[0]
        return out.flatten(1)[:, None]
