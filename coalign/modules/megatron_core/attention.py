"""Attention of megatron-core's layers over packed rows: the kernel of coalign.modules.attention in its place.

So prompts that several sequences continue are computed once, with every backend alike, and context parallelism is a
change of heads (Ulysses) that needs no Transformer Engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from coalign.modules.attention import attend
from coalign.modules.layout import Block
from coalign.modules.megatron_core.alibi import Alibi
from coalign.modules.parallel.rows import HeadExchange


@dataclass(frozen=True, slots=True)
class PackedRow:
    """What attention has to know of a row. megatron-core hands it through, recomputation included, as it would its own
    parameters of packed sequences. ``positions`` i64[P]: of this rank's part of the row. ``angles`` f32[P, 1, 1, D]:
    for latent attention, which megatron-core gives none."""

    positions: Tensor
    blocks: tuple[Block, ...]
    heads: HeadExchange | None = None
    angles: Tensor | None = None

    qkv_format: ClassVar[str] = "blocks"  # none of those that megatron-core treats in some way of its own


class PackedAttention(nn.Module):
    """query [P, 1, heads, D], key [P, 1, groups, D] and value [P, 1, groups, E] -> [P, 1, heads · E].

    ``alibi``: of all heads of the model.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        *,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection,
        alibi: Alibi | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.scaling = softmax_scale
        self.window = None if config.window_size is None else config.window_size[0] + 1
        self.alibi = alibi and alibi.part(pg_collection.tp.rank(), pg_collection.tp.size())

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedRow,
        **_: Any,
    ) -> Tensor:
        packed, alibi = packed_seq_params, self.alibi
        states = [x[:, 0] for x in (query, key, value)]
        if packed.heads is not None:
            states = [packed.heads.taken(x.transpose(0, 1)[None])[0].transpose(0, 1) for x in states]
            alibi = alibi and alibi.part(packed.heads.group.rank(), packed.heads.group.size())
        out = attend(*states, blocks=packed.blocks, scaling=self.scaling, window=self.window, bias=alibi)
        if packed.heads is not None:
            out = packed.heads.given_back(out[None])[0]
        return out.flatten(1)[:, None]
