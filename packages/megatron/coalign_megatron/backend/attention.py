"""Attention of megatron-core's layers over packed rows, with coalign.backends.attention as its kernel.

So every backend computes shared prompts once, and context parallelism exchanges heads (Ulysses) without Transformer
Engine. The file owns ALiBi (2108.12409), rotary angles by position with every `rope_scaling` of the families, and
multi-head latent attention (DeepSeek V2, 2405.04434).

The rotary formulas are those of transformers (modeling_rope_utils). megatron-core counts angles by index in the row,
knows Llama 3's scaling with its default numbers only, and has no dynamic scaling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, ClassVar, Self, cast

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings import apply_rotary_pos_emb
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import multi_latent_attention
from torch import Tensor, nn

from coalign.backends.attention import attend
from coalign.backends.hf.row_sharding import HeadExchange
from coalign.backends.packing import Block, RowPlan
from coalign.backends.pretrained import check_rope_length
from coalign_megatron.families import MegatronConfig, RopeScaling


@dataclass(frozen=True)
class Alibi:
    """The bias of ALiBi: scores fall linearly with the distance of their key, in each head with its own slope.

    slopes f32[heads]. scale: factor of the bias. rounded: compute in bfloat16, as Falcon does.
    """

    slopes: Tensor
    scale: float = 1.0
    rounded: bool = False

    @classmethod
    def of(cls, model: MegatronConfig) -> Self | None:
        """Return the model's bias; None for a model without ALiBi."""
        if model.position_embedding_type != "alibi":
            return None
        scaled = model.alibi_scaled
        return cls(compute_slopes(model.num_attention_heads), model.kv_channels**-0.5 if scaled else 1.0, scaled)

    def shard(self, index: int, count: int) -> Self:
        """Return the bias for the heads of rank ``index`` of ``count``."""
        return replace(self, slopes=self.slopes.chunk(count)[index])

    def __call__(self, keys: Tensor) -> Tensor:
        """Return f32[heads, K], which is added to the scores of the keys at positions i64[K]."""
        slope = self.slopes.to(keys.device, torch.bfloat16 if self.rounded else torch.float32)
        return (slope[:, None] * keys).float() * self.scale


def compute_slopes(heads: int) -> Tensor:
    """Return slopes f32[heads]: 2^(-8 i / heads) if that is a power of two.

    Other numbers of heads use the largest power of two below, and odd slopes of twice that power for the rest.
    """
    power = 2 ** int(math.log2(heads))
    first = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    return torch.tensor(first + [2 ** (-4 * i / power) for i in range(1, 2 * (heads - power), 2)])


def compute_rotary_angles(model: MegatronConfig, positions: Tensor, blocks: Sequence[Block]) -> Tensor | None:
    """Compute rotary angles f32[P, 1, 1, D] of positions i64[P], or i64[3, P] on three axes; D of a head's numbers are
    rotated.

    ``blocks``: the whole row's. Returns None for a model without rotary embeddings. ValueError for a sequence above
    the length at which dynamic scaling begins: it changes the angles of the whole row.
    """
    if model.position_embedding_type != "rope":
        return None
    longest = max(block.prefix_length + max(block.lengths) for block in blocks)
    if model.rope_scaling is not None and model.rope_scaling.kind == "dynamic":
        check_rope_length("dynamic", model.max_position_embeddings, longest)
    turns = positions.float()[..., None] * compute_rotary_frequencies(model).to(positions.device)
    if positions.dim() > 1:  # Qwen2-VL (2409.12191): each axis turns some of the pairs
        turns = torch.stack([turns[axis, :, pair] for pair, axis in enumerate(model.mrope_axes)], -1)
    both = turns.repeat_interleave(2, 1) if model.rotary_interleaved else torch.cat([turns, turns], 1)
    return both[:, None, None]


def compute_rotary_frequencies(model: MegatronConfig) -> Tensor:
    """Compute f32[D / 2]: the angle by which each pair of numbers is rotated per position."""
    latent = model.multi_latent_attention
    size = model.qk_pos_emb_head_dim if latent else int(model.kv_channels * model.rotary_percent)
    base, scaling = model.rotary_base, model.rope_scaling
    speed = 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    if scaling is None or scaling.kind == "dynamic":  # which begins where sequences are refused
        return speed
    slow = speed / scaling.factor
    if scaling.kind == "linear":
        return slow
    kept = _llama3_share(scaling, speed) if scaling.kind == "llama3" else _yarn_share(scaling, model, size)
    return slow * (1 - kept) + speed * kept


def _llama3_share(scaling: RopeScaling, speed: Tensor) -> Tensor:
    """Llama 3: the share of its frequency that a pair keeps, by its full turns within the training length.

    Pairs of few turns keep nothing, pairs of many turns all of it.
    """
    low, high, length = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position_embeddings
    assert low is not None and high is not None and length is not None  # families require them
    turns = length * speed / (2 * math.pi)
    return ((turns - low) / (high - low)).clamp(0, 1)


def _yarn_share(scaling: RopeScaling, model: MegatronConfig, size: int) -> Tensor:
    """YaRN (2309.00071): the same share, linear in the pair's number between pairs of two given numbers of turns."""
    length = scaling.original_max_position_embeddings or model.max_position_embeddings

    def pair(turns: float) -> float:
        return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(model.rotary_base))

    first = max(math.floor(pair(scaling.beta_fast or 32)), 0)
    last = min(math.ceil(pair(scaling.beta_slow or 1)), size - 1)
    slowed = (torch.arange(size // 2, dtype=torch.float32) - first) / max(last - first, 0.001)
    return 1 - slowed.clamp(0, 1)


def compute_attention_factor(scaling: RopeScaling | None) -> float:
    """Return the factor of rotated queries and keys (YaRN; 1.0 otherwise)."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _yarn_factor(scaling.factor, scaling.mscale) / _yarn_factor(scaling.factor, scaling.mscale_all_dim)
    return _yarn_factor(scaling.factor, 1.0)


def _yarn_factor(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True, slots=True)
class PackedRow:
    """Describes a row to attention; megatron-core passes it on as its own parameters of packed sequences.

    positions i64[P] of this rank's chunk of the row. angles f32[P, 1, 1, D]: for latent attention only, which gets no
    angles from megatron-core.
    """

    positions: Tensor
    plan: RowPlan
    heads: HeadExchange | None = None
    angles: Tensor | None = None

    qkv_format: ClassVar[str] = "blocks"  # a name that megatron-core does not treat specially


class PackedAttention(nn.Module):
    """query [P, 1, heads, D], key [P, 1, groups, D] and value [P, 1, groups, E] -> [P, 1, heads · E].

    ``alibi``: the bias of all heads of the model.
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
        self.alibi = alibi and alibi.shard(pg_collection.tp.rank(), pg_collection.tp.size())

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
            alibi = alibi and alibi.shard(packed.heads.group.rank(), packed.heads.group.size())
        out = attend(*states, plan=packed.plan, scaling=self.scaling, window=self.window, bias=alibi)
        if packed.heads is not None:
            out = packed.heads.join_heads(out[None])[0]
        return out.flatten(1)[:, None]


# 0.16.1 tests for a class of Transformer Engine that is only a placeholder where that is not installed.
multi_latent_attention.HAVE_TE = find_spec("transformer_engine") is not None

EPSILON = 1e-6  # the norms of compressed states take it, whatever config.json says for other norms


class LatentAttention(multi_latent_attention.MLASelfAttention):
    """Latent attention with angles by position; megatron-core counts them by index in the row.

    It also mends a gradient: without Transformer Engine, under tensor parallelism, megatron-core computes the gradient
    of the key component that all heads share from the rank's own heads only. ``scaling``: that of the angles.
    """

    def __init__(self, *arguments: Any, scaling: RopeScaling | None, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.factor = compute_attention_factor(scaling)
        del self.rotary_pos_emb

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: None = None,
        position_ids: None = None,
        packed_seq_params: PackedRow | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return query and key [P, 1, heads, D], value [P, 1, heads, E], and the compressed states of both."""
        assert packed_seq_params is not None and packed_seq_params.angles is not None
        config, angles = self.config, packed_seq_params.angles
        position, value_size = config.qk_pos_emb_head_dim, config.v_head_dim
        compressed = self._compress_query(hidden_states)
        latent, shared = self._compress_key_value(hidden_states)
        query = self._heads(
            (self.linear_q_proj if config.q_lora_rank is None else self.linear_q_up_proj)(compressed)[0]
        )
        key, value = self._heads(self.linear_kv_up_proj(latent)[0]).split([config.qk_head_dim, value_size], -1)
        query, rotated = query.split([config.qk_head_dim, position], -1)
        rotated, shared = (
            apply_rotary_pos_emb(x, angles, config, mscale=self.factor, cp_group=self.pg_collection.cp)
            for x in (rotated, shared[:, :, None])
        )
        query, key = torch.cat([query, rotated], -1), torch.cat([key, shared.expand(*key.shape[:-1], -1)], -1)
        return query, key, value, compressed, latent

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_attention_heads_per_partition, -1))

    def _compress_query(self, hidden: Tensor) -> Tensor:
        """Return the states that queries are computed from, [P or a chunk of it, 1, rank], or ``hidden`` itself."""
        if self.config.q_lora_rank is None:
            return hidden
        down = self.linear_q_down_proj(hidden)[0]
        if down.shape[-1] != self.config.q_lora_rank:
            down = self._local_tokens(tensor_parallel.gather_from_tensor_model_parallel_region(down))
        return self.q_layernorm(down)

    def _compress_key_value(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states of keys and values, and for all tokens the key component [P, 1, D] that all heads share."""
        config = self.config
        sizes = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
        down = self.linear_kv_down_proj(hidden)[0]
        if down.shape[-1] == sum(sizes):
            latent, shared = down.split(sizes, -1)
            if config.sequence_parallel:
                shared = tensor_parallel.gather_from_sequence_parallel_region(shared, group=self.tp_group)
        else:  # megatron-core's own layer is sharded over ranks and has gathered the tokens
            latent, shared = tensor_parallel.gather_from_tensor_model_parallel_region(down).split(sizes, -1)
            latent, shared = self._local_tokens(latent), tensor_parallel.copy_to_tensor_model_parallel_region(shared)
        return cast(nn.Module, self.kv_layernorm)(latent), shared

    def _local_tokens(self, x: Tensor) -> Tensor:
        if not self.config.sequence_parallel:
            return x
        return tensor_parallel.scatter_to_sequence_parallel_region(x, group=self.tp_group)
