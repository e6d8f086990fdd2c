"""The layers of a model, as megatron-core's specs: its own, with attention over packed rows, and ours where a family
has what it lacks."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from coalign.modules.megatron_core.alibi import Alibi
from coalign.modules.megatron_core.attention import PackedAttention
from coalign.modules.megatron_core.cut import check_recomputed
from coalign.modules.megatron_core.latent import EPSILON, LatentAttention
from coalign.modules.megatron_core.norm import Norm
from coalign.modules.megatron_core.residual import ParallelLayer
from coalign.modules.megatron_core.router import GroupedRouter
from coalign.weights.families import MegatronConfig


def block(
    model: MegatronConfig, config: TransformerConfig, *, te: bool, chunk: int | None = None
) -> TransformerBlockSubmodules:
    """The layers that this rank has, in a chunk of its pipeline stage. ``te``: Transformer Engine's.

    Raises NotImplementedError for those where it is not installed, and what `check_recomputed` raises.
    """
    check_recomputed(model, config.recompute_modules if config.recompute_granularity == "selective" else [])
    if te and find_spec("transformer_engine") is None:
        raise NotImplementedError(
            "layers of Transformer Engine were asked for; transformer_engine, which needs a GPU, is not installed here"
        )
    found = get_gpt_decoder_block_spec(
        config, use_transformer_engine=te, normalization=model.normalization, vp_stage=chunk
    )
    for layer in found.layer_specs:
        _attention(layer, model, te=te)
        _norms(layer, model, te=te)
        if model.parallel_residual != "none":
            layer.module, layer.params = ParallelLayer, {"one_norm": model.parallel_residual == "one_norm"}
        mlp = layer.submodules.mlp
        if mlp.module is MoELayer and model.moe_router_num_groups:
            mlp.submodules.router = partial(GroupedRouter, best=model.moe_router_group_best)
    if not te or not model.layernorm_affine:
        found.layer_norm = _norm(model)
    return found


def _norm(model: MegatronConfig, **settings: float) -> ModuleSpec:
    return ModuleSpec(module=Norm, params={"affine": model.layernorm_affine, **settings})


def _attention(layer: ModuleSpec, model: MegatronConfig, *, te: bool) -> None:
    attention = layer.submodules.self_attention
    parts = attention.submodules
    parts.core_attention = ModuleSpec(module=PackedAttention, params={"alibi": Alibi.of(model)})
    if model.multi_latent_attention:
        attention.module = LatentAttention
        attention.params = {**attention.params, "scaling": model.rope_scaling}
        if not te:
            parts.q_layernorm = parts.kv_layernorm = _norm(model, epsilon=EPSILON)
    elif model.qk_layernorm and not te:
        parts.q_layernorm = parts.k_layernorm = _norm(model)


def _norms(layer: ModuleSpec, model: MegatronConfig, *, te: bool) -> None:
    """Before attention and MLP. Transformer Engine has them in the linear layers that they feed, where each feeds one
    and has weights."""
    parts, engine = layer.submodules, TESpecProvider()
    if te and model.parallel_residual == "none" and model.layernorm_affine:
        return
    if te:
        parts.self_attention.submodules.linear_qkv = engine.column_parallel_linear()
        parts.mlp.submodules.linear_fc1 = engine.column_parallel_linear()
    norm = engine.layer_norm() if te and model.layernorm_affine else _norm(model)
    parts.input_layernorm = norm
    parts.pre_mlp_layernorm = IdentityOp if model.parallel_residual == "one_norm" else norm
