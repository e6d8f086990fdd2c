"""Falcon: 7B (one key and value, one norm), 40B (groups, two norms), RW (ALiBi, no parallel residual)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from coalign.weights.families.family import Family
from coalign.weights.families.settings import (
    CLASSIC,
    MEGATRON,
    Activation,
    ConfigField,
    ConvertedFields,
    Hf,
    Rope,
    norm_epsilon,
    tied_embeddings,
)
from coalign.weights.families.sources import SingleTensor
from coalign.weights.layouts.megatron_config import MegatronConfig


def _group_heads(hf: Hf) -> bool:
    return hf.get("new_decoder_architecture", hf.get("model_type") == "RefinedWeb")


def _two_norms(hf: Hf) -> bool:
    return _group_heads(hf) and hf.get("num_ln_in_parallel_attn") in (None, 2)


def _read(hf: Hf) -> dict[str, Any]:
    heads = hf.get("num_attention_heads") or hf["n_head"]
    parallel = hf.get("parallel_attn", True)
    if _group_heads(hf):
        if not parallel:
            raise ValueError("config.json: 'parallel_attn' is False; with 'new_decoder_architecture' it has to be True")
        groups = hf.get("num_kv_heads") or hf.get("n_head_kv") or heads
    else:
        groups = 1 if hf.get("multi_query", True) else heads
    norms = "two_norms" if _two_norms(hf) else "one_norm"
    return {"num_query_groups": groups, "parallel_residual": norms if parallel else "none"}


def _write(config: MegatronConfig) -> dict[str, Any]:
    heads, groups = config.num_attention_heads, config.num_query_groups
    parallel = config.parallel_residual != "none"
    grouped = config.parallel_residual == "two_norms" or groups not in (1, heads)
    return {
        "new_decoder_architecture": grouped,
        "num_kv_heads": groups,
        "multi_query": groups != heads,
        "parallel_attn": parallel,
        "num_ln_in_parallel_attn": (2 if config.parallel_residual == "two_norms" else 1) if grouped else None,
    }


def _alibi(hf: Hf) -> dict[str, Any]:
    alibi = bool(hf.get("alibi", False))
    return {"position_embedding_type": "alibi" if alibi else "rope", "alibi_scaled": alibi}


FALCON = Family(
    name="falcon",
    architectures=("FalconForCausalLM", "RWForCausalLM"),
    model_types=("falcon", "RefinedWebModel", "RefinedWeb"),
    settings=(
        ConfigField("num_layers", "num_hidden_layers", older=("n_layer",)),
        ConfigField("hidden_size", "hidden_size"),
        ConfigField("num_attention_heads", "num_attention_heads", older=("n_head",)),
        ConfigField("vocab_size", "vocab_size"),
        ConfigField("max_position_embeddings", "max_position_embeddings", 2048),
        ConfigField("ffn_hidden_size", "ffn_hidden_size", MEGATRON),
        ConfigField("add_bias_linear", "bias", False),
        Activation("activation", "gelu"),
        norm_epsilon("layer_norm_epsilon", 1e-5),
        tied_embeddings(True),
        Rope(),
        CLASSIC,
        ConvertedFields(_read, _write),
        ConvertedFields(_alibi, lambda config: {"alibi": config.position_embedding_type == "alibi"}),
    ),
    tensors={
        "embedding.word_embeddings": SingleTensor("transformer.word_embeddings"),
        "decoder.final_layernorm": SingleTensor("transformer.ln_f"),
        "output_layer": SingleTensor("lm_head"),
    },
    layer={
        "input_layernorm": SingleTensor("input_layernorm"),
        "self_attention.linear_qkv": SingleTensor("self_attention.query_key_value"),
        "self_attention.linear_proj": SingleTensor("self_attention.dense"),
        "pre_mlp_layernorm": SingleTensor("post_attention_layernorm"),
        "mlp.linear_fc1": SingleTensor("mlp.dense_h_to_4h"),
        "mlp.linear_fc2": SingleTensor("mlp.dense_4h_to_h"),
    },
    prefix="transformer.h.{layer}.",
    base="transformer.",
    when=lambda hf: not _two_norms(hf),
)

FALCON_40B = replace(
    FALCON,
    name="falcon_40b",
    layer={
        **FALCON.layer,
        "input_layernorm": SingleTensor("ln_attn"),
        "pre_mlp_layernorm": SingleTensor("ln_mlp"),
    },
    when=_two_norms,
)
