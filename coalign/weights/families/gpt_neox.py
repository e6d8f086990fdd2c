"""GPT-NeoX, Pythia: attention and MLP beside each other, each with its norm; a part of each head is rotated."""

from __future__ import annotations

from coalign.weights.families.family import Family
from coalign.weights.families.settings import (
    CLASSIC,
    FFN,
    SIZES,
    Activation,
    ConvertedFields,
    FixedFields,
    RequiredValue,
    Rope,
    norm_epsilon,
    tied_embeddings,
)
from coalign.weights.families.sources import SingleTensor

GPT_NEOX = Family(
    name="gpt_neox",
    architectures=("GPTNeoXForCausalLM",),
    model_types=("gpt_neox",),
    settings=(
        *SIZES,
        FFN,
        Activation("hidden_act", "gelu"),
        Rope("rotary_emb_base", "rotary_pct", default_percent=0.25),
        norm_epsilon("layer_norm_eps", 1e-5),
        tied_embeddings(False),
        CLASSIC,
        FixedFields(add_bias_linear=True),
        ConvertedFields(
            lambda hf: {"parallel_residual": "two_norms" if hf.get("use_parallel_residual", True) else "none"},
            lambda config: {"use_parallel_residual": config.parallel_residual == "two_norms"},
        ),
        RequiredValue("attention_bias", True),
    ),
    tensors={
        "embedding.word_embeddings": SingleTensor("gpt_neox.embed_in"),
        "decoder.final_layernorm": SingleTensor("gpt_neox.final_layer_norm"),
        "output_layer": SingleTensor("embed_out"),
    },
    layer={
        "input_layernorm": SingleTensor("input_layernorm"),
        "self_attention.linear_qkv": SingleTensor("attention.query_key_value"),
        "self_attention.linear_proj": SingleTensor("attention.dense"),
        "pre_mlp_layernorm": SingleTensor("post_attention_layernorm"),
        "mlp.linear_fc1": SingleTensor("mlp.dense_h_to_4h"),
        "mlp.linear_fc2": SingleTensor("mlp.dense_4h_to_h"),
    },
    prefix="gpt_neox.layers.{layer}.",
    memory={"output_layer": SingleTensor("lm_head")},
    base="gpt_neox.",
    computed=("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"),
)
