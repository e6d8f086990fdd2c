"""Baichuan 1 and 2, which only their own code loads: 7B with rotary embeddings, 13B with ALiBi."""

from __future__ import annotations

from typing import Any

from coalign.weights.families.family import Family
from coalign.weights.families.llama import ATTENTION, MLP, PREFIX, TENSORS
from coalign.weights.families.settings import (
    FFN,
    Activation,
    ConfigField,
    ConvertedFields,
    Hf,
    norm_epsilon,
    tied_embeddings,
)
from coalign.weights.families.sources import QueryKeyValueBlocks
from coalign.weights.layouts.megatron_config import MegatronConfig


def _positions(hf: Hf) -> dict[str, Any]:
    """7B has `max_position_embeddings`; 13B, with ALiBi, only `model_max_length`."""
    if (rotary := hf.get("max_position_embeddings")) is not None:
        return {"position_embedding_type": "rope", "max_position_embeddings": rotary}
    return {"position_embedding_type": "alibi", "max_position_embeddings": hf.get("model_max_length", 4096)}


def _lengths(config: MegatronConfig) -> dict[str, Any]:
    longest = {"model_max_length": config.max_position_embeddings}
    rotary = {"max_position_embeddings": config.max_position_embeddings}
    return longest if config.position_embedding_type == "alibi" else longest | rotary


# Version 2 normalises the rows of its head. Nothing in config.json says so but a new setting and the new vocabulary.
NORM_HEAD = ConvertedFields(
    lambda hf: {"normalised_head": "z_loss_weight" in hf or hf["vocab_size"] == 125696},
    lambda config: {"z_loss_weight": 0} if config.normalised_head else {},
)

BAICHUAN = Family(
    name="baichuan",
    architectures=("BaichuanForCausalLM", "BaiChuanForCausalLM"),
    model_types=("baichuan",),
    settings=(
        ConfigField("num_layers", "num_hidden_layers"),
        ConfigField("hidden_size", "hidden_size"),
        ConfigField("num_attention_heads", "num_attention_heads"),
        ConfigField("vocab_size", "vocab_size"),
        FFN,
        Activation(),
        norm_epsilon("rms_norm_eps", 1e-6),
        tied_embeddings(False),
        ConvertedFields(_positions, _lengths),
        NORM_HEAD,
    ),
    tensors=TENSORS,
    layer=ATTENTION | MLP | {"self_attention.linear_qkv": QueryKeyValueBlocks("self_attn.W_pack")},
    prefix=PREFIX,
)
