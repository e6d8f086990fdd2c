"""Other names of Megatron's parameters: with Transformer Engine's layers, in torch_dist files, before megatron-core.

Each renames the canonical templates of coalign.weights.layouts.megatron_model; checked against megatron-core 0.16.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from coalign.weights.families.family import Parameter
from coalign.weights.layouts.megatron_config import MegatronConfig
from coalign.weights.layouts.megatron_model import EXPERT, LAYER

# Whose layers a model has: megatron-core's own, Transformer Engine's, those of Megatron-LM before megatron-core.
LayerSpec = Literal["local", "te", "legacy"]

QKV_NORM = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
MLP_NORM = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
LATENT_NORMS = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
LEGACY = {
    "input_layernorm.": "input_layernorm.",
    "self_attention.linear_qkv.": "self_attention.query_key_value.",
    "self_attention.linear_proj.": "self_attention.dense.",
    "pre_mlp_layernorm.": "post_attention_layernorm.",
    "mlp.linear_fc1.": "mlp.dense_h_to_4h.",
    "mlp.linear_fc2.": "mlp.dense_4h_to_h.",
}
LEGACY_OUTSIDE = {
    "embedding.": "language_model.embedding.",
    "decoder.": "language_model.encoder.",
    "output_layer.": "language_model.output_layer.",
}
TIED_HEAD = {"local": "output_layer.weight", "te": "output_layer.weight", "legacy": "word_embeddings_for_head.weight"}
# Transformer Engine's model replicates these on every tensor-parallel rank.
DUPLICATED = ("self_attention.linear_q_down_proj.weight", "self_attention.linear_kv_down_proj.weight")


def name_in_model(config: MegatronConfig, parameter: Parameter, spec: LayerSpec = "local") -> str:
    """Return a parameter's template in the model of a process.

    Raises ValueError for `legacy` and a parameter that did not exist before megatron-core.
    """
    if spec == "local":
        return parameter.template
    if spec == "legacy":
        if parameter.layer is not None and not parameter.template.removeprefix(LAYER).startswith(tuple(LEGACY)):
            raise ValueError(f"'{parameter.name}' has no name in Megatron-LM before core")
        return _replace_prefix(_rename_in_layer(parameter.template, LEGACY), LEGACY_OUTSIDE)
    if parameter.expert is not None:
        return parameter.template.replace(EXPERT, "mlp.experts.") + "{expert}"
    return _rename_in_layer(parameter.template, _fused_norms(config, parameter.moe))


def name_in_torch_dist(config: MegatronConfig, parameter: Parameter, spec: Literal["local", "te"] = "local") -> str:
    """Return a parameter's template in a torch_dist checkpoint that was written with that spec.

    Which layers and experts are stacked there: coalign.weights.convert.torch_dist.
    """
    norms = QKV_NORM | MLP_NORM if spec == "local" and not config.multi_latent_attention else {}
    return _rename_in_layer(parameter.template, norms if spec == "local" else _fused_norms(config, parameter.moe))


def _fused_norms(config: MegatronConfig, moe: bool) -> dict[str, str]:
    """Return Transformer Engine's names of the norms that it fuses with the linear layer that they feed.

    Layers with a parallel residual keep their norms separate.
    """
    if config.parallel_residual != "none":
        return {}
    attention = LATENT_NORMS if config.multi_latent_attention else QKV_NORM
    return attention if moe else attention | MLP_NORM


def _rename_in_layer(template: str, table: Mapping[str, str]) -> str:
    """Apply ``table`` to the beginning of a name within a layer; other names stay."""
    if not template.startswith(LAYER):
        return template
    return LAYER + _replace_prefix(template.removeprefix(LAYER), table)


def _replace_prefix(name: str, table: Mapping[str, str]) -> str:
    return next((new + name.removeprefix(old) for old, new in table.items() if name.startswith(old)), name)
