"""Angles of rotary embeddings by position, stretched by every kind of `rope_scaling` that families have.

The formulas are those of transformers (modeling_rope_utils). megatron-core's own angles are by place in a row, know
Llama 3's scaling with its numbers only, and no dynamic one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from coalign.modules.layout import Block
from coalign.weights.families import MegatronConfig, RopeScaling


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
