"""megatron-core models over packed rows: causal language models, and models with a scalar head.

Layers are megatron-core's, with attention over packed rows, and own ones where it lacks one: a norm for models without
Transformer Engine, layers whose attention and MLP read the same residual (GPT-NeoX, Falcon), and DeepSeek's router,
which chooses among groups of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from coalign.algorithms.logprobs import VocabularyShard
from coalign.backends.hf.heads import LanguageModelHead
from coalign.backends.hf.row_sharding import HeadExchange
from coalign.backends.packing import Layout
from coalign.backends.vision import place_features
from coalign_megatron.backend.attention import (
    EPSILON,
    Alibi,
    LatentAttention,
    PackedAttention,
    PackedRow,
    compute_rotary_angles,
)
from coalign_megatron.backend.partition import check_recomputed
from coalign_megatron.backend.vision import PipelineVision
from coalign_megatron.families import MegatronConfig


class PackedNorm(nn.Module):
    """An RMSNorm, or a LayerNorm with bias, with zero-centred weights and sequence parallelism.

    megatron-core's own norm has neither. affine: it has weights. epsilon: replaces the value of the configuration.
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
            # Each rank has other tokens of a row: megatron-core sums the gradients of marked parameters.
            setattr(parameter, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> the same, in its dtype."""
        weight, dtype = self.weight, x.dtype
        if self.less_one and weight is not None:  # in float32: bf16 would round small differences from 1
            weight, x = 1 + weight.float(), x.float()
        if self.centred:
            return F.layer_norm(x, self.shape, weight, self.bias, self.eps).to(dtype)
        return F.rms_norm(x, self.shape, weight, self.eps).to(dtype)


class ParallelLayer(TransformerLayer):
    """Computes x + attention(norm(x)) + MLP(norm(x)). ``one_norm``: both share one norm."""

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
        """[P, 1, H] -> [P, 1, H], and None in place of a cross-attention context."""
        normed = self.input_layernorm(hidden_states)
        attended = self.self_attention(
            normed, attention_mask, rotary_pos_emb=rotary_pos_emb, packed_seq_params=packed_seq_params
        )
        added = self.mlp(normed if self.one_norm else self.pre_mlp_layernorm(hidden_states))
        fused = self.config.bias_dropout_fusion
        out = self.self_attn_bda(self.training, fused)(attended, hidden_states, self.hidden_dropout)
        return self.mlp_bda(self.training, fused)(added, out, self.hidden_dropout), None


@dataclass(frozen=True, slots=True)
class ExpertGroupChoice:
    """Chooses groups of experts by their ``best`` best experts, in place of megatron-core's recorded choice.

    megatron-core counts topk / group_topk experts of a group, which is right only for DeepSeek V3's own numbers.
    """

    best: int

    def get_replay_topk(
        self, scores: Tensor, topk: int, groups: int, group_topk: int, _: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        """Return the ``topk`` greatest of scores [T, E] in the chosen groups, and their experts, both [T, topk]."""
        grouped = scores.unflatten(1, (groups, -1))
        sums = grouped.topk(min(self.best, grouped.shape[2]), -1).values.sum(-1)
        chosen = torch.zeros_like(sums, dtype=torch.bool).scatter(1, sums.topk(group_topk).indices, True)
        return grouped.masked_fill(~chosen[:, :, None], -torch.inf).flatten(1).topk(topk)


class GroupedRouter(TopKRouter):
    """A router with ExpertGroupChoice; expert biases are constant unless an update rate is set."""

    def __init__(self, *arguments: Any, best: int, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.router_replay = ExpertGroupChoice(best)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count the tokens of each expert only if biases are updated: megatron-core compiles this function."""
        if self.config.moe_router_bias_update_rate:
            super()._apply_expert_bias(routing_map, padding_mask)


def build_block(
    model: MegatronConfig, config: TransformerConfig, *, te: bool, chunk: int | None = None
) -> TransformerBlockSubmodules:
    """Build the spec of this rank's layers, in a chunk of its pipeline stage. ``te``: with Transformer Engine's layers.

    Raises NotImplementedError if that is not installed, and what `check_recomputed` raises.
    """
    check_recomputed(model, (config.recompute_modules or []) if config.recompute_granularity == "selective" else [])
    if te and find_spec("transformer_engine") is None:
        raise NotImplementedError(
            "layers of Transformer Engine were asked for; transformer_engine, which needs a GPU, is not installed here"
        )
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=te, normalization=model.normalization, vp_stage=chunk
    )
    for layer in spec.layer_specs or []:
        _set_attention(layer, model, te=te)
        _set_norms(layer, model, te=te)
        if model.parallel_residual != "none":
            layer.module, layer.params = ParallelLayer, {"one_norm": model.parallel_residual == "one_norm"}
        mlp = cast(Any, layer.submodules).mlp
        if mlp.module is MoELayer and model.moe_router_num_groups:
            mlp.submodules.router = partial(GroupedRouter, best=model.moe_router_group_best)
    if not te or not model.layernorm_affine:
        spec.layer_norm = _norm(model)
    return spec


def _norm(model: MegatronConfig, **settings: float) -> ModuleSpec:
    return ModuleSpec(module=PackedNorm, params={"affine": model.layernorm_affine, **settings})


def _set_attention(layer: ModuleSpec, model: MegatronConfig, *, te: bool) -> None:
    attention = cast(Any, layer.submodules).self_attention
    submodules = attention.submodules
    submodules.core_attention = ModuleSpec(module=PackedAttention, params={"alibi": Alibi.of(model)})
    if model.multi_latent_attention:
        attention.module = LatentAttention
        attention.params = {**attention.params, "scaling": model.rope_scaling}
        if not te:
            submodules.q_layernorm = submodules.kv_layernorm = _norm(model, epsilon=EPSILON)
    elif model.qk_layernorm and not te:
        submodules.q_layernorm = submodules.k_layernorm = _norm(model)


def _set_norms(layer: ModuleSpec, model: MegatronConfig, *, te: bool) -> None:
    """Set the norms before attention and MLP.

    Transformer Engine fuses a norm that has weights into the one linear layer that it feeds.
    """
    submodules, provider = cast(Any, layer.submodules), TESpecProvider()
    if te and model.parallel_residual == "none" and model.layernorm_affine:
        return
    if te:
        submodules.self_attention.submodules.linear_qkv = provider.column_parallel_linear()
        submodules.mlp.submodules.linear_fc1 = provider.column_parallel_linear()
    norm = provider.layer_norm() if te and model.layernorm_affine else _norm(model)
    submodules.input_layernorm = norm
    submodules.pre_mlp_layernorm = IdentityOp if model.parallel_residual == "one_norm" else norm


class PackedGPT(GPTModel):
    """A chunk of a causal LM: some of its layers; the first chunk has the embedding, the last the head.

    vocabulary: rows of embedding and head, padding included. read: computes the head's outputs.
    """

    def __init__(
        self,
        model: MegatronConfig,
        config: TransformerConfig,
        *,
        vocabulary: int,
        read: LanguageModelHead | None,
        first: bool = True,
        last: bool = True,
        chunk: int | None = None,
        te: bool = False,
        vision: PipelineVision | None = None,
    ) -> None:
        super().__init__(
            config,
            cast(ModuleSpec, build_block(model, config, te=te, chunk=chunk)),  # it takes block specs, too
            vocabulary,
            model.max_position_embeddings,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=model.share_embeddings_and_output_weights,
            position_embedding_type="learned_absolute"
            if model.position_embedding_type == "learned_absolute"
            else "none",
            scatter_embedding_sequence_parallel=vision is None,  # features are placed in the whole row
            vp_stage=chunk,
        )
        self.described, self.read, self.seen = model, read, vision
        if first and vision is not None:
            self.vision = vision.tower
            for number in range(model.deepstack_layers):
                self.decoder.layers[number].register_forward_hook(partial(self._add_features, number))
        self._added: list[Tensor] = []  # features of the current row: [P, 1, H] for each of the first layers
        if first and model.embedding_layernorm:
            self.embedding.layernorm = PackedNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(
        self, layout: Layout, heads: HeadExchange | None = None, needs: Sequence[str] = ()
    ) -> Tensor | dict[str, Tensor]:
        """Return hidden states [P, 1, H] for the next chunk, or the outputs of the last one.

        ``layout``: this rank's chunk of the row (coalign.backends.hf.row_sharding.RowShard).
        """
        positions = layout.positions if layout.axes is None else layout.axes
        angles = compute_rotary_angles(self.described, positions, layout.blocks)
        embedded = self._embed(layout) if self.pre_process else None
        if embedded is not None and torch.is_grad_enabled():  # that of a frozen embedding has no gradient by itself
            embedded.requires_grad_()
        latent = self.described.multi_latent_attention
        hidden = self.decoder(
            hidden_states=embedded,
            attention_mask=None,
            rotary_pos_emb=None if latent else angles,
            packed_seq_params=PackedRow(layout.positions, layout.plan, heads, angles if latent else None),
        )
        return self._outputs(hidden, layout, needs) if self.post_process else hidden

    def _embed(self, layout: Layout) -> Tensor:
        """Return [P, 1, H], or this rank's chunk of it under sequence parallelism."""
        seen = self.seen and self.seen.embedder.find_features(layout.tokens, layout.images, layout.offset)
        hidden = self.embedding(layout.tokens[None], layout.positions[None])
        if seen is not None:
            positions, (*layers,) = seen
            hidden = self._scatter(place_features(hidden[:, 0], positions, layers)[:, None])
            blank = hidden.new_zeros(len(layout.tokens), hidden.shape[-1])
            deeper = layers[1:] if len(positions) else []
            self._added = [self._scatter(place_features(blank, positions, [layer])[:, None]) for layer in deeper]
        if self.described.embedding_scale != 1.0:
            hidden = hidden * torch.tensor(self.described.embedding_scale, dtype=hidden.dtype)
        return cast(nn.Module, self.embedding.layernorm)(hidden) if self.described.embedding_layernorm else hidden

    def _scatter(self, row: Tensor) -> Tensor:
        """This rank's chunk of a row [P, 1, H] under sequence parallelism; else all of it."""
        if not self.config.sequence_parallel:
            return row
        return tensor_parallel.scatter_to_sequence_parallel_region(row, group=self.pg_collection.tp)

    def _add_features(self, number: int, _: nn.Module, __: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        """Add features of images to what a layer makes (deepstack, 2406.04334)."""
        hidden, *rest = output
        return (hidden + self._added[number] if self._added else hidden, *rest)

    def _outputs(self, hidden: Tensor, layout: Layout, needs: Sequence[str]) -> dict[str, Tensor]:
        config, group = self.config, self.pg_collection.tp
        if config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, group=group)
        elif group.size() > 1:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden, group=group)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        weight = cast(Tensor, self.output_layer.weight if weight is None else weight)
        real = self.described.vocab_size
        first = group.rank() * len(weight)
        weight = weight[: max(0, real - first)]  # no logits for padding
        if self.described.normalised_head:
            weight = F.normalize(weight)
        shard = VocabularyShard(group, first, real) if group.size() > 1 else None
        assert self.read is not None
        return self.read(hidden[:, 0][layout.predictors], weight, layout, needs, share=shard)


class ScalarGPT(PackedGPT):
    """A chunk of a model with a scalar head: one row of weights, whole on every rank, as ``output_layer``."""

    def __init__(self, model: MegatronConfig, config: TransformerConfig, *, output: str, **settings: Any) -> None:
        super().__init__(model, config, read=None, **settings)
        self.output = output
        if self.post_process:
            self.output_layer = nn.Linear(config.hidden_size, 1, bias=False, dtype=config.params_dtype)

    def _outputs(self, hidden: Tensor, layout: Layout, needs: Sequence[str]) -> dict[str, Tensor]:
        if self.config.sequence_parallel:  # every rank reads the whole row, so gradients are not summed
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        positions = layout.predictors if self.output == "values" else layout.last
        return {self.output: F.linear(hidden[:, 0][positions].float(), self.output_layer.weight.float())[:, 0]}
