"""The layers of a model, as megatron-core's specs: its own, with attention over packed rows, and ours where a family
has what it lacks.

The norm of models whose layers are not Transformer Engine's.

Layers whose attention and MLP read the same residual (GPT-NeoX, Falcon).

The router of DeepSeek's experts, which looks for them in some groups of experts only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from coalign.backends.megatron.attention import EPSILON, Alibi, LatentAttention, PackedAttention, PackedRow
from coalign.backends.megatron.partition import check_recomputed
from coalign.weights.families import MegatronConfig


class Norm(nn.Module):
    """An RMSNorm or a LayerNorm, which has a bias. megatron-core's has neither weights less 1 nor sequence parallelism.

    ``affine``: with weights at all. ``epsilon``: in place of what megatron-core says for all norms of a model.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        affine: bool = True,
        epsilon: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.eps, self.shape = (eps if epsilon is None else epsilon), (hidden_size,)
        self.centred, self.less_one = config.normalization == "LayerNorm", config.layernorm_zero_centered_gamma
        initial = torch.zeros(self.shape) if self.less_one else torch.ones(self.shape)
        self.weight = nn.Parameter(initial) if affine else None
        self.bias = nn.Parameter(torch.zeros(self.shape)) if affine and self.centred else None
        for parameter in self.parameters():
            # Ranks have other tokens of a row each: megatron-core sums the gradients of what is marked.
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> the same, in its dtype."""
        weight, given = self.weight, x.dtype
        if self.less_one and weight is not None:  # in float32: bf16 would round what little differs from 1
            weight, x = 1 + weight.float(), x.float()
        if self.centred:
            return F.layer_norm(x, self.shape, weight, self.bias, self.eps).to(given)
        return F.rms_norm(x, self.shape, weight, self.eps).to(given)


class ParallelLayer(TransformerLayer):
    """x + attention(norm(x)) + MLP(norm(x)). ``one_norm``: the same one for both, else each has its own."""

    def __init__(self, *arguments: Any, one_norm: bool, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.one_norm = one_norm

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: PackedRow | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """[P, 1, H] -> the same; and nothing, where megatron-core has the context of cross-attention."""
        read = self.input_layernorm(hidden_states)
        attended = self.self_attention(
            read, attention_mask, rotary_pos_emb=rotary_pos_emb, packed_seq_params=packed_seq_params
        )
        made = self.mlp(read if self.one_norm else self.pre_mlp_layernorm(hidden_states))
        fused = self.config.bias_dropout_fusion
        out = self.self_attn_bda(self.training, fused)(attended, hidden_states, self.hidden_dropout)
        return self.mlp_bda(self.training, fused)(made, out, self.hidden_dropout), None


@dataclass(frozen=True, slots=True)
class ExpertGroupChoice:
    """A group is judged by its ``best`` best experts. megatron-core counts topk / group_topk of them, which is right
    for version 3 with its own numbers only. It asks this where it would ask for a recorded choice."""

    best: int

    def get_replay_topk(
        self, scores: Tensor, topk: int, groups: int, group_topk: int, _: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        """Of scores [T, E] the greatest ``topk``, and which experts' they are, both [T, topk]."""
        grouped = scores.unflatten(1, (groups, -1))
        of_groups = grouped.topk(min(self.best, grouped.shape[2]), -1).values.sum(-1)
        chosen = torch.zeros_like(of_groups, dtype=torch.bool).scatter(1, of_groups.topk(group_topk).indices, True)
        return grouped.masked_fill(~chosen[:, :, None], -torch.inf).flatten(1).topk(topk)


class GroupedRouter(TopKRouter):
    """``best``: as in ExpertGroupChoice. The biases of experts stay what they are, unless a rate of change
    was asked for."""

    def __init__(self, *arguments: Any, best: int, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.router_replay = ExpertGroupChoice(best)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count the tokens of each expert, where that is for something: megatron-core compiles it."""
        if self.config.moe_router_bias_update_rate:
            super()._apply_expert_bias(routing_map, padding_mask)


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
