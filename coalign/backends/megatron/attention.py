"""Attention of megatron-core's layers over packed rows: the kernel of coalign.backends.attention in its place.

So prompts that several sequences continue are computed once, with every backend alike, and context parallelism is a
change of heads (Ulysses) that needs no Transformer Engine.

ALiBi (2108.12409): scores lose with the distance of their key, in each head at another pace.

Angles of rotary embeddings by position, stretched by every kind of `rope_scaling` that families have.

The formulas are those of transformers (modeling_rope_utils). megatron-core's own angles are by place in a row, know
Llama 3's scaling with its numbers only, and no dynamic one.

Multi-head latent attention (DeepSeek V2, 2405.04434) of megatron-core over packed rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, ClassVar, Self

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings import apply_rotary_pos_emb
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import multi_latent_attention
from torch import Tensor, nn

from coalign.backends.attention import attend
from coalign.backends.hf.rows import HeadExchange
from coalign.backends.layout import Block
from coalign.weights.families import MegatronConfig, RopeScaling


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


def angles(model: MegatronConfig, positions: Tensor, blocks: Sequence[Block]) -> Tensor | None:
    """f32[P, 1, 1, D] of i64[P], where D of a head's numbers are turned; None for a model without rotary embeddings.
    ``blocks``: of the whole row."""
    if model.position_embedding_type != "rope":
        return None
    turns = torch.outer(positions.float(), speeds(model, _longest(blocks)).to(positions.device))
    both = turns.repeat_interleave(2, 1) if model.rotary_interleaved else torch.cat([turns, turns], 1)
    return both[:, None, None]


def speeds(model: MegatronConfig, longest: int) -> Tensor:
    """f32[D / 2]: how far each pair of numbers is turned from one position to the next. ``longest``: tokens of the
    longest sequence of the row, which dynamic scaling goes by."""
    latent = model.multi_latent_attention
    size = model.qk_pos_emb_head_dim if latent else int(model.kv_channels * model.rotary_percent)
    base, scaling = model.rotary_base, model.rope_scaling
    if scaling is not None and scaling.kind == "dynamic":
        beyond = max(longest / model.max_position_embeddings, 1.0)
        base *= (scaling.factor * beyond - (scaling.factor - 1)) ** (size / (size - 2))
    speed = 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    if scaling is None or scaling.kind == "dynamic":
        return speed
    slow = speed / scaling.factor
    if scaling.kind == "linear":
        return slow
    kept = _by_turns(scaling, speed) if scaling.kind == "llama3" else _by_pair(scaling, model, size)
    return slow * (1 - kept) + speed * kept


def _by_turns(scaling: RopeScaling, speed: Tensor) -> Tensor:
    """Llama 3: how much of its speed a pair keeps, by its turns within the length that the model was trained on: those
    of few turns nothing, those of many all of it."""
    low, high, length = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position_embeddings
    turns = length * speed / (2 * math.pi)
    return ((turns - low) / (high - low)).clamp(0, 1)


def _by_pair(scaling: RopeScaling, model: MegatronConfig, size: int) -> Tensor:
    """YaRN (2309.00071): the same, but even from pair to pair, between two that have a number of turns each."""
    length = scaling.original_max_position_embeddings or model.max_position_embeddings

    def pair(turns: float) -> float:
        return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(model.rotary_base))

    first = max(math.floor(pair(scaling.beta_fast or 32)), 0)
    last = min(math.ceil(pair(scaling.beta_slow or 1)), size - 1)
    slowed = (torch.arange(size // 2, dtype=torch.float32) - first) / max(last - first, 0.001)
    return 1 - slowed.clamp(0, 1)


def attention_factor(scaling: RopeScaling | None) -> float:
    """What the turned numbers of queries and keys are multiplied by (YaRN; 1.0 otherwise)."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _softened(scaling.factor, scaling.mscale) / _softened(scaling.factor, scaling.mscale_all_dim)
    return _softened(scaling.factor, 1.0)


def _softened(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longest(blocks: Sequence[Block]) -> int:
    return max((block.prefix[1] - block.prefix[0] if block.prefix else 0) + max(block.lengths) for block in blocks)


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
            states = [packed.heads.split_heads(x.transpose(0, 1)[None])[0].transpose(0, 1) for x in states]
            alibi = alibi and alibi.part(packed.heads.group.rank(), packed.heads.group.size())
        out = attend(*states, blocks=packed.blocks, scaling=self.scaling, window=self.window, bias=alibi)
        if packed.heads is not None:
            out = packed.heads.join_heads(out[None])[0]
        return out.flatten(1)[:, None]


# 0.16.1 asks whether a layer is of a class of Transformer Engine's that is a stand-in where that is not installed.
multi_latent_attention.HAVE_TE = find_spec("transformer_engine") is not None

# Of the norms of compressed states, whatever a config.json says for the others.
EPSILON = 1e-6


class LatentAttention(multi_latent_attention.MLASelfAttention):
    """With angles by position; megatron-core's are by place in the row. And with the right gradient without Transformer
    Engine: under tensor parallelism megatron-core takes that of the part of a key that all heads share from the rank's
    own heads alone.

    ``scaling``: of the angles.
    """

    def __init__(self, *arguments: Any, scaling: RopeScaling | None, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.factor = attention_factor(scaling)
        del self.rotary_pos_emb

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: None = None,
        position_ids: None = None,
        packed_seq_params: PackedRow | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """query and key [P, 1, heads, D], value [P, 1, heads, E], and the compressed states that they are made of."""
        config, angles = self.config, packed_seq_params.angles
        position, value_size = config.qk_pos_emb_head_dim, config.v_head_dim
        asked = self._asked(hidden_states)
        latent, shared = self._compressed(hidden_states)
        query = self._heads((self.linear_q_proj if config.q_lora_rank is None else self.linear_q_up_proj)(asked)[0])
        key, value = self._heads(self.linear_kv_up_proj(latent)[0]).split([config.qk_head_dim, value_size], -1)
        query, turned = query.split([config.qk_head_dim, position], -1)
        turned, shared = (
            apply_rotary_pos_emb(x, angles, config, mscale=self.factor, cp_group=self.pg_collection.cp)
            for x in (turned, shared[:, :, None])
        )
        query, key = torch.cat([query, turned], -1), torch.cat([key, shared.expand(*key.shape[:-1], -1)], -1)
        return query, key, value, asked, latent

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_attention_heads_per_partition, -1))

    def _asked(self, hidden: Tensor) -> Tensor:
        """What queries are made of [P or its part, 1, rank], or the hidden states where they are not compressed."""
        if self.config.q_lora_rank is None:
            return hidden
        down = self.linear_q_down_proj(hidden)[0]
        if down.shape[-1] != self.config.q_lora_rank:
            down = self._own_tokens(tensor_parallel.gather_from_tensor_model_parallel_region(down))
        return self.q_layernorm(down)

    def _compressed(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What keys and values are made of, and what all heads have of a key [P, 1, D], of all tokens."""
        config = self.config
        sizes = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
        down = self.linear_kv_down_proj(hidden)[0]
        if down.shape[-1] == sum(sizes):
            latent, shared = down.split(sizes, -1)
            if config.sequence_parallel:
                shared = tensor_parallel.gather_from_sequence_parallel_region(shared, group=self.tp_group)
        else:  # megatron-core's own layer is cut over ranks, and has gathered the tokens
            latent, shared = tensor_parallel.gather_from_tensor_model_parallel_region(down).split(sizes, -1)
            latent, shared = self._own_tokens(latent), tensor_parallel.copy_to_tensor_model_parallel_region(shared)
        return self.kv_layernorm(latent), shared

    def _own_tokens(self, x: Tensor) -> Tensor:
        if not self.config.sequence_parallel:
            return x
        return tensor_parallel.scatter_to_sequence_parallel_region(x, group=self.tp_group)
