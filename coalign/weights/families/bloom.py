"""BLOOM: ALiBi, a norm of the embedding, heads that are packed as Megatron has them."""

from __future__ import annotations

from coalign.weights.families.family import Family
from coalign.weights.families.settings import (
    CLASSIC,
    ConfigField,
    FixedFields,
    RequiredValue,
    norm_epsilon,
    tied_embeddings,
)
from coalign.weights.families.sources import SingleTensor

BLOOM = Family(
    name="bloom",
    architectures=("BloomForCausalLM",),
    model_types=("bloom",),
    settings=(
        ConfigField("num_layers", "n_layer", older=("num_hidden_layers",)),
        ConfigField("hidden_size", "hidden_size", older=("n_embed",)),
        ConfigField("num_attention_heads", "n_head", older=("num_attention_heads",)),
        ConfigField("vocab_size", "vocab_size"),
        ConfigField("max_position_embeddings", "seq_length", 2048),
        norm_epsilon("layer_norm_epsilon", 1e-5),
        tied_embeddings(True),
        CLASSIC,
        FixedFields(position_embedding_type="alibi", activation_func="gelu_tanh"),
        FixedFields(add_bias_linear=True, embedding_layernorm=True),
        RequiredValue("apply_residual_connection_post_layernorm", False),
    ),
    tensors={
        "embedding.word_embeddings": SingleTensor("transformer.word_embeddings"),
        "embedding.layernorm": SingleTensor("transformer.word_embeddings_layernorm"),
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
)
