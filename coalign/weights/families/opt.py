"""OPT, and Galactica, which has no biases and norms without weights."""

from __future__ import annotations

from typing import Any

from coalign.weights.families.family import Family
from coalign.weights.families.settings import (
    CLASSIC,
    SIZES,
    Activation,
    ConfigField,
    ConvertedFields,
    FixedFields,
    Hf,
    RequiredValue,
    tied_embeddings,
)
from coalign.weights.families.sources import QueryKeyValueTensors, SingleTensor
from coalign.weights.layouts.megatron_config import MegatronConfig


def _embedded(hf: Hf) -> dict[str, Any]:
    """Embeddings of another width than the model (350M) have a projection that Megatron does not."""
    width = hf.get("word_embed_proj_dim") or hf["hidden_size"]
    if width != hf["hidden_size"]:
        raise ValueError(f"config.json: 'word_embed_proj_dim' is {width}; Megatron needs the hidden size")
    return {}


def _width(config: MegatronConfig) -> dict[str, Any]:
    return {"word_embed_proj_dim": config.hidden_size}


OPT = Family(
    name="opt",
    architectures=("OPTForCausalLM",),
    model_types=("opt",),
    settings=(
        *SIZES,
        ConfigField("ffn_hidden_size", "ffn_dim"),
        Activation("activation_function", "relu"),
        tied_embeddings(True),
        CLASSIC,
        FixedFields(position_embedding_type="learned_absolute", layernorm_epsilon=1e-5),
        ConfigField("add_bias_linear", "enable_bias", True),
        ConfigField("layernorm_affine", "layer_norm_elementwise_affine", True),
        ConvertedFields(_embedded, _width),
        RequiredValue("do_layer_norm_before", True),
        RequiredValue("_remove_final_layer_norm", False),
    ),
    tensors={
        "embedding.word_embeddings": SingleTensor("model.decoder.embed_tokens"),
        # The first two rows were for padding in fairseq; position 0 is row 2.
        "embedding.position_embeddings": SingleTensor("model.decoder.embed_positions", skip=2),
        "decoder.final_layernorm": SingleTensor("model.decoder.final_layer_norm"),
        "output_layer": SingleTensor("lm_head"),
    },
    layer={
        "input_layernorm": SingleTensor("self_attn_layer_norm"),
        "self_attention.linear_qkv": QueryKeyValueTensors("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "self_attention.linear_proj": SingleTensor("self_attn.out_proj"),
        "pre_mlp_layernorm": SingleTensor("final_layer_norm"),
        "mlp.linear_fc1": SingleTensor("fc1"),
        "mlp.linear_fc2": SingleTensor("fc2"),
    },
    prefix="model.decoder.layers.{layer}.",
)
