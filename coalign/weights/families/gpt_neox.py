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
    epsilon,
    tied,
)
from coalign.weights.families.sources import Same

GPT_NEOX = Family(
    name="gpt_neox",
    architectures=("GPTNeoXForCausalLM",),
    model_types=("gpt_neox",),
    settings=(
        *SIZES,
        FFN,
        Activation("hidden_act", "gelu"),
        Rope("rotary_emb_base", "rotary_pct", default_percent=0.25),
        epsilon("layer_norm_eps", 1e-5),
        tied(False),
        CLASSIC,
        FixedFields(add_bias_linear=True),
        ConvertedFields(
            lambda hf: {"parallel_residual": "two_norms" if hf.get("use_parallel_residual", True) else "none"},
            lambda config: {"use_parallel_residual": config.parallel_residual == "two_norms"},
        ),
        RequiredValue("attention_bias", True),
    ),
    tensors={
        "embedding.word_embeddings": Same("gpt_neox.embed_in"),
        "decoder.final_layernorm": Same("gpt_neox.final_layer_norm"),
        "output_layer": Same("embed_out"),
    },
    layer={
        "input_layernorm": Same("input_layernorm"),
        "self_attention.linear_qkv": Same("attention.query_key_value"),
        "self_attention.linear_proj": Same("attention.dense"),
        "pre_mlp_layernorm": Same("post_attention_layernorm"),
        "mlp.linear_fc1": Same("mlp.dense_h_to_4h"),
        "mlp.linear_fc2": Same("mlp.dense_4h_to_h"),
    },
    prefix="gpt_neox.layers.{layer}.",
    memory={"output_layer": Same("lm_head")},
    base="gpt_neox.",
    computed=("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"),
)
