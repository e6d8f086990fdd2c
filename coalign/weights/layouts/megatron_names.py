"""Other names of Megatron's parameters: in a model with Transformer Engine layers, in torch_dist files, before core.

Each is a renaming of the canonical templates (coalign.weights.layouts.megatron_model), checked against megatron-core 0.16.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from coalign.weights.families.family import Parameter
from coalign.weights.layouts.megatron_config import MegatronConfig
from coalign.weights.layouts.megatron_model import EXPERT, LAYER

Spec = Literal["local", "te", "legacy"]  # megatron-core's own layers, Transformer Engine's, Megatron-LM before core

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
# Transformer Engine's model has these whole on every tensor-parallel rank.
DUPLICATED = ("self_attention.linear_q_down_proj.weight", "self_attention.linear_kv_down_proj.weight")


def in_model(config: MegatronConfig, parameter: Parameter, spec: Spec = "local") -> str:
    """A parameter's template in the model that a process holds. ValueError for one that had no name before core."""
    if spec == "local":
        return parameter.template
    if spec == "legacy":
        return _legacy(parameter)
    if parameter.expert is not None:
        return parameter.template.replace(EXPERT, "mlp.experts.") + "{expert}"
    return _within(parameter.template, _fused(config, parameter.moe))


def in_torch_dist(config: MegatronConfig, parameter: Parameter, spec: Literal["local", "te"] = "local") -> str:
    """A parameter's template in a torch_dist checkpoint, written with that spec. Which layers and experts are stacked
    there: coalign.weights.convert.torch_dist."""
    norms = QKV_NORM | MLP_NORM if spec == "local" and not config.multi_latent_attention else {}
    return _within(parameter.template, norms if spec == "local" else _fused(config, parameter.moe))


def _fused(config: MegatronConfig, moe: bool) -> dict[str, str]:
    """Transformer Engine has a norm in the linear layer that it feeds, where it feeds one; a parallel residual has
    layers of its own (`parallel_residual`), whose norms stand alone."""
    if config.parallel_residual != "none":
        return {}
    attention = LATENT_NORMS if config.multi_latent_attention else QKV_NORM
    return attention if moe else attention | MLP_NORM


def _within(template: str, table: Mapping[str, str]) -> str:
    """Renamed by how its name begins within a layer."""
    if not template.startswith(LAYER):
        return template
    rest = template.removeprefix(LAYER)
    return LAYER + next((new + rest.removeprefix(old) for old, new in table.items() if rest.startswith(old)), rest)


def _legacy(parameter: Parameter) -> str:
    rest = parameter.template.removeprefix(LAYER)
    if parameter.layer is not None and not rest.startswith(tuple(LEGACY)):
        raise ValueError(f"'{parameter.name}' has no name in Megatron-LM before core")
    found = _within(parameter.template, LEGACY)
    return next((new + found.removeprefix(old) for old, new in LEGACY_OUTSIDE.items() if found.startswith(old)), found)
