"""The parameters of a Megatron model: names, shapes and tensor-parallel cuts, from its configuration.

Names are those of megatron-core's local spec, as templates: `{layer}` and `{expert}` are numbers. Shapes are of full
tensors: `linear_qkv` has group by group its queries, key and value; a gated `linear_fc1` is [gate | up] over all of F.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from coalign.weights.layouts.megatron_config import MegatronConfig
from coalign.weights.layouts.shards import Box, Shape

# How tensor parallelism cuts: not; dimension 0; dimension 1; both halves of dimension 0 ([gate | up]); the vocabulary.
TensorParallelCut = Literal["replicated", "column", "row", "gated", "vocabulary"]
LAYER = "decoder.layers.{layer}."
EXPERT = "mlp.experts.local_experts.{expert}."


@dataclass(frozen=True, slots=True)
class MegatronParameter:
    """One parameter of the model without parallelism; only its vocabulary is padded.

    ``layer``, ``expert``: None outside of layers and experts. ``moe``: its layer has experts. ``dtype``: None for that
    of the weights it is made of.
    """

    template: str
    shape: Shape
    kind: TensorParallelCut
    layer: int | None = None
    expert: int | None = None
    moe: bool = False
    dtype: torch.dtype | None = None

    @property
    def name(self) -> str:
        """The name with the numbers of its layer and its expert in the whole model."""
        return self.template.format(layer=self.layer, expert=self.expert)

    def cut(self, index: int, count: int) -> tuple[Shape, list[tuple[Box, Box]]]:
        """Return the shape on rank ``index`` of ``count``, and pairs of boxes: of the full tensor, of that rank's.

        Raises ValueError if the size does not divide.
        """
        shape = self.shape
        full: Box = tuple((0, size) for size in shape)
        if self.kind == "replicated":
            return shape, [(full, full)]
        dim, halves = (1 if self.kind == "row" else 0), (2 if self.kind == "gated" else 1)
        half = shape[dim] // halves
        if shape[dim] % (halves * count):
            raise ValueError(f"'{self.name}' {list(shape)}: {half} rows or columns do not divide by {count} ranks")
        own = half // count
        boxes = []
        for i in range(halves):
            there: list[tuple[int, int]] = list(full)
            here = list(there)
            there[dim] = (i * half + index * own, i * half + (index + 1) * own)
            here[dim] = (i * own, (i + 1) * own)
            boxes.append((tuple(there), tuple(here)))
        return (*shape[:dim], halves * own, *shape[dim + 1 :]), boxes


def list_parameters(config: MegatronConfig, vocabulary: int) -> Iterator[MegatronParameter]:
    """Yield all parameters in the order of the model. ``vocabulary``: its padded size."""
    hidden = config.hidden_size
    yield MegatronParameter("embedding.word_embeddings.weight", (vocabulary, hidden), "vocabulary")
    if config.position_embedding_type == "learned_absolute":
        yield MegatronParameter(
            "embedding.position_embeddings.weight", (config.max_position_embeddings, hidden), "replicated"
        )
    if config.embedding_layernorm:
        yield from _norm(config, "embedding.layernorm", hidden)
    for layer in range(config.num_layers):
        moe = bool(config.moe_layer_freq and config.moe_layer_freq[layer])
        mlp = _experts(config) if moe else _mlp(config, "mlp.", config.ffn_hidden_size)
        for part in (*_attention(config), *mlp):
            yield MegatronParameter(LAYER + part.template, part.shape, part.kind, layer, part.expert, moe, part.dtype)
    yield from _norm(config, "decoder.final_layernorm", hidden)
    if not config.share_embeddings_and_output_weights:
        yield MegatronParameter("output_layer.weight", (vocabulary, hidden), "vocabulary")


def _attention(config: MegatronConfig) -> Iterator[MegatronParameter]:
    hidden, heads, head = config.hidden_size, config.num_attention_heads, config.kv_channels
    bias = config.add_bias_linear
    yield from _norm(config, "input_layernorm", hidden)
    if config.multi_latent_attention:
        yield from _latent(config)
        head = config.v_head_dim
    else:
        rows = (heads + 2 * config.num_query_groups) * head
        yield from _linear("self_attention.linear_qkv", rows, hidden, "column", bias or config.add_qkv_bias)
        if config.qk_layernorm:
            yield from _norm(config, "self_attention.q_layernorm", head)
            yield from _norm(config, "self_attention.k_layernorm", head)
    yield from _linear("self_attention.linear_proj", hidden, heads * head, "row", bias)
    if config.parallel_residual != "one_norm":
        yield from _norm(config, "pre_mlp_layernorm", hidden)


def _latent(config: MegatronConfig) -> Iterator[MegatronParameter]:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""
    hidden, heads, qk = config.hidden_size, config.num_attention_heads, config.qk_head_dim + config.qk_pos_emb_head_dim
    if config.q_lora_rank is None:
        yield from _linear("self_attention.linear_q_proj", heads * qk, hidden, "column")
    else:
        yield from _linear("self_attention.linear_q_down_proj", config.q_lora_rank, hidden, "column")
        yield from _norm(config, "self_attention.q_layernorm", config.q_lora_rank)
        yield from _linear("self_attention.linear_q_up_proj", heads * qk, config.q_lora_rank, "column")
    rank = config.kv_lora_rank
    yield from _linear("self_attention.linear_kv_down_proj", rank + config.qk_pos_emb_head_dim, hidden, "column")
    yield from _norm(config, "self_attention.kv_layernorm", rank)
    rows = heads * (config.qk_head_dim + config.v_head_dim)
    yield from _linear("self_attention.linear_kv_up_proj", rows, rank, "column")


def _experts(config: MegatronConfig) -> Iterator[MegatronParameter]:
    assert config.num_moe_experts is not None
    experts, hidden = config.num_moe_experts, config.hidden_size
    yield MegatronParameter("mlp.router.weight", (experts, hidden), "replicated")
    if config.moe_router_enable_expert_bias:
        yield MegatronParameter("mlp.router.expert_bias", (experts,), "replicated", dtype=torch.float32)
    for expert in range(experts):
        for part in _mlp(config, EXPERT, config.moe_ffn_hidden_size):
            yield MegatronParameter(part.template, part.shape, part.kind, expert=expert)
    if config.moe_shared_expert_intermediate_size:
        yield from _mlp(config, "mlp.shared_experts.", config.moe_shared_expert_intermediate_size)
        if config.moe_shared_expert_gate:
            yield MegatronParameter("mlp.shared_experts.gate_weight", (1, hidden), "replicated")


def _mlp(config: MegatronConfig, prefix: str, ffn: int) -> Iterator[MegatronParameter]:
    hidden, bias, gated = config.hidden_size, config.add_bias_linear, config.gated_linear_unit
    yield from _linear(prefix + "linear_fc1", 2 * ffn if gated else ffn, hidden, "gated" if gated else "column", bias)
    yield from _linear(prefix + "linear_fc2", hidden, ffn, "row", bias)


def _linear(
    name: str, rows: int, columns: int, kind: TensorParallelCut, bias: bool = False
) -> Iterator[MegatronParameter]:
    yield MegatronParameter(name + ".weight", (rows, columns), kind)
    if bias:
        yield MegatronParameter(name + ".bias", (rows,), "replicated" if kind == "row" else kind)


def _norm(config: MegatronConfig, name: str, size: int) -> Iterator[MegatronParameter]:
    if not config.layernorm_affine:
        return
    yield MegatronParameter(name + ".weight", (size,), "replicated")
    if config.normalization == "LayerNorm":
        yield MegatronParameter(name + ".bias", (size,), "replicated")
