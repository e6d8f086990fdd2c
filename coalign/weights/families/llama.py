"""Llama 1, 2, 3 (Code Llama, Yi, DeepSeek-LLM …) and families that differ from it by a few settings.

Mistral, Gemma, and Mixtral (Mistral with experts in every layer).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from coalign.weights.families.family import Family
from coalign.weights.families.settings import (
    ALL_LAYERS,
    FFN,
    GROUPS,
    HEAD,
    ROUTER,
    SIZES,
    STACKED,
    TOP_K,
    Activation,
    ConfigField,
    ConvertedFields,
    FixedFields,
    Hf,
    RequiredValue,
    Rope,
    norm_epsilon,
    tied_embeddings,
    window,
)
from coalign.weights.families.sources import ConcatenatedTensors, QueryKeyValueTensors, SingleTensor
from coalign.weights.layouts.megatron_model import EXPERT

TENSORS = {
    "embedding.word_embeddings": SingleTensor("model.embed_tokens"),
    "decoder.final_layernorm": SingleTensor("model.norm"),
    "output_layer": SingleTensor("lm_head"),
}
ATTENTION = {
    "input_layernorm": SingleTensor("input_layernorm"),
    "self_attention.linear_qkv": QueryKeyValueTensors("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.linear_proj": SingleTensor("self_attn.o_proj"),
    "pre_mlp_layernorm": SingleTensor("post_attention_layernorm"),
}
MLP = {
    "mlp.linear_fc1": ConcatenatedTensors(("mlp.gate_proj", "mlp.up_proj")),
    "mlp.linear_fc2": SingleTensor("mlp.down_proj"),
}
PREFIX = "model.layers.{layer}."

COMMON = (
    *SIZES,
    GROUPS,
    HEAD,
    FFN,
    Activation(),
    Rope(),
    norm_epsilon("rms_norm_eps", 1e-6),
    tied_embeddings(False),
)

LLAMA = Family(
    name="llama",
    architectures=("LlamaForCausalLM", "LLaMAForCausalLM", "YiForCausalLM"),
    model_types=("llama",),
    settings=(
        *COMMON,
        RequiredValue("attention_bias", False),
        RequiredValue("mlp_bias", False),
    ),
    tensors=TENSORS,
    layer=ATTENTION | MLP,
    prefix=PREFIX,
)

MISTRAL = replace(
    LLAMA,
    name="mistral",
    architectures=("MistralForCausalLM",),
    model_types=("mistral",),
    settings=(
        *COMMON,
        window(4096),
    ),
)


def _gelu(hf: Hf) -> dict[str, Any]:
    """The first Gemmas say `gelu`, and were trained with its tanh approximation all the same."""
    found = hf.get("hidden_activation") or hf.get("hidden_act") or "gelu_pytorch_tanh"
    if found not in ("gelu", "gelu_pytorch_tanh"):
        raise ValueError(f"config.json: 'hidden_activation' is {found!r}; Gemma has 'gelu_pytorch_tanh'")
    return {"activation_func": "gelu_tanh"}


GEMMA = replace(
    LLAMA,
    name="gemma",
    architectures=("GemmaForCausalLM",),
    model_types=("gemma",),
    settings=(
        *SIZES,
        GROUPS,
        HEAD,
        FFN,
        ConvertedFields(_gelu, lambda config: dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh")),
        Rope(),
        norm_epsilon("rms_norm_eps", 1e-6),
        tied_embeddings(True),
        FixedFields(layernorm_zero_centered_gamma=True),
        ConvertedFields(lambda hf: {"embedding_scale": hf["hidden_size"] ** 0.5}, lambda config: {}),
        RequiredValue("attention_bias", False),
    ),
)


W = "block_sparse_moe.experts.{expert}."

MIXTRAL = replace(
    LLAMA,
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    model_types=("mixtral",),
    settings=(
        *COMMON,
        ConfigField("moe_ffn_hidden_size", "intermediate_size"),
        Rope(default_base=1000000.0),
        norm_epsilon("rms_norm_eps", 1e-5),
        window(None),
        ConfigField("num_moe_experts", "num_local_experts", older=("num_experts",)),
        TOP_K,
        ALL_LAYERS,
    ),
    layer=ATTENTION
    | {
        "mlp.router": SingleTensor("block_sparse_moe.gate"),
        EXPERT + "linear_fc1": ConcatenatedTensors((W + "w1", W + "w3")),
        EXPERT + "linear_fc2": SingleTensor(W + "w2"),
    },
    memory=ROUTER | STACKED,
)
