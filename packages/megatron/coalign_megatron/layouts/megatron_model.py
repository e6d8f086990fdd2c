"""The parameters of a Megatron model: names, shapes and tensor-parallel cuts, from its configuration.

Names are those of megatron-core's local spec, as templates: `{layer}` and `{expert}` are numbers. Shapes are of full
tensors: `linear_qkv` has group by group its queries, key and value; a gated `linear_fc1` is [gate | up] over all of F.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from coalign_megatron.layouts.shards import Box, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary angles are scaled beyond the length that a model was first trained on.

    The fields are those of transformers' `rope_scaling`; a number that the type does not use is None.
    """

    kind: Literal["linear", "dynamic", "llama3", "yarn"]
    factor: float
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronConfig:
    """Fields are those of megatron-core's TransformerConfig, MLATransformerConfig and GPTModel, where it has them.

    It has a function as ``activation_func``, no position embeddings `alibi` and `none`, and none of the fields under
    "not in megatron-core".
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int  # in dense layers; if gated, the size of one of the two halves
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int  # the size of a head
    vocab_size: int  # the real one; padding is the layout's business
    max_position_embeddings: int
    share_embeddings_and_output_weights: bool = False

    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"  # a LayerNorm has a bias
    layernorm_epsilon: float = 1e-5
    layernorm_zero_centered_gamma: bool = False  # weights are stored less 1
    qk_layernorm: bool = False
    activation_func: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    gated_linear_unit: bool = True
    add_bias_linear: bool = False  # all linear layers have one (queries, keys and values too)
    add_qkv_bias: bool = False

    position_embedding_type: Literal["rope", "learned_absolute", "alibi", "none"] = "rope"
    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False
    rope_scaling: RopeScaling | None = None
    window_size: tuple[int, int] | None = None  # how many tokens back and ahead a token sees, beside itself

    num_moe_experts: int | None = None
    moe_layer_freq: tuple[int, ...] = ()  # per layer: 1, it has experts; () if there are none
    moe_router_topk: int = 0
    moe_ffn_hidden_size: int = 0
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_gate: bool = False
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    moe_router_pre_softmax: bool = False
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_topk_scaling_factor: float | None = None
    moe_router_enable_expert_bias: bool = False

    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 0
    qk_head_dim: int = 0
    qk_pos_emb_head_dim: int = 0
    v_head_dim: int = 0

    # not in megatron-core
    parallel_residual: Literal["none", "one_norm", "two_norms"] = "none"  # attention and MLP read the same residual
    embedding_layernorm: bool = False  # a LayerNorm right after the word embedding (BLOOM)
    embedding_scale: float = 1.0  # the embedding is multiplied by this (Gemma)
    layernorm_affine: bool = True  # False: norms of layers have neither weights nor biases (Galactica)
    alibi_scaled: bool = False  # slopes are added before the division by √head (Falcon), else after it
    moe_router_group_best: int = 2  # how many of its best experts a group is judged by (DeepSeek V2: 1)
    normalised_head: bool = False  # rows of the output layer have length 1 when it is used (Baichuan 2)
    mrope_axes: tuple[int, ...] = ()  # by which of three positions each pair of numbers turns (Qwen2-VL); (): one
    deepstack_layers: int = 0  # the first layers, behind which features of images are added (Qwen3-VL)
    tower: tuple[tuple[str, Shape], ...] = ()  # names and shapes of a vision tower's parameters, which nobody cuts


# How tensor parallelism cuts: not; dimension 0; dimension 1; both halves of dimension 0 ([gate | up]); the vocabulary.
TensorParallelCut = Literal["replicated", "column", "row", "gated", "vocabulary"]
LAYER = "decoder.layers.{layer}."
TOWER = "vision."  # prefix of parameters that the first stage has beside the language model's
EXPERT = "mlp.experts.local_experts.{expert}."


@dataclass(frozen=True, slots=True)
class MegatronParameter:
    """One parameter of the model without parallelism; only its vocabulary is padded.

    ``layer``, ``expert``: None outside of layers and experts. ``moe``: its layer has experts. ``dtype``: None for that
    of the weights it is made of.
    """

    template: str
    shape: Shape
    sharding: TensorParallelCut
    layer: int | None = None
    expert: int | None = None
    moe: bool = False
    dtype: torch.dtype | None = None

    @property
    def name(self) -> str:
        """The name with the numbers of its layer and its expert in the whole model."""
        return self.template.format(layer=self.layer, expert=self.expert)

    def cut(self, index: int, count: int) -> tuple[Shape, list[tuple[Box, Box]]]:
        """Return the shape on rank ``index`` of ``count``, and pairs of boxes: (in the full tensor, in that rank's).

        Raises ValueError if the size does not divide.
        """
        shape = self.shape
        full: Box = tuple((0, size) for size in shape)
        if self.sharding == "replicated":
            return shape, [(full, full)]
        dim, halves = (1 if self.sharding == "row" else 0), (2 if self.sharding == "gated" else 1)
        half = shape[dim] // halves
        if shape[dim] % (halves * count):
            raise ValueError(f"'{self.name}' {list(shape)}: {half} rows or columns do not divide by {count} ranks")
        size = half // count
        boxes = []
        for i in range(halves):
            there: list[tuple[int, int]] = list(full)
            here = list(there)
            there[dim] = (i * half + index * size, i * half + (index + 1) * size)
            here[dim] = (i * size, (i + 1) * size)
            boxes.append((tuple(there), tuple(here)))
        return (*shape[:dim], halves * size, *shape[dim + 1 :]), boxes


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
        for p in (*_attention(config), *mlp):
            yield MegatronParameter(LAYER + p.template, p.shape, p.sharding, layer, p.expert, moe, p.dtype)
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
        for p in _mlp(config, EXPERT, config.moe_ffn_hidden_size):
            yield MegatronParameter(p.template, p.shape, p.sharding, expert=expert)
    if config.moe_shared_expert_intermediate_size:
        yield from _mlp(config, "mlp.shared_experts.", config.moe_shared_expert_intermediate_size)
        if config.moe_shared_expert_gate:
            yield MegatronParameter("mlp.shared_experts.gate_weight", (1, hidden), "replicated")


def _mlp(config: MegatronConfig, prefix: str, ffn: int) -> Iterator[MegatronParameter]:
    hidden, bias, gated = config.hidden_size, config.add_bias_linear, config.gated_linear_unit
    yield from _linear(prefix + "linear_fc1", 2 * ffn if gated else ffn, hidden, "gated" if gated else "column", bias)
    yield from _linear(prefix + "linear_fc2", hidden, ffn, "row", bias)


def _linear(
    name: str, rows: int, columns: int, sharding: TensorParallelCut, bias: bool = False
) -> Iterator[MegatronParameter]:
    yield MegatronParameter(name + ".weight", (rows, columns), sharding)
    if bias:
        yield MegatronParameter(name + ".bias", (rows,), "replicated" if sharding == "row" else sharding)


def _norm(config: MegatronConfig, name: str, size: int) -> Iterator[MegatronParameter]:
    if not config.layernorm_affine:
        return
    yield MegatronParameter(name + ".weight", (size,), "replicated")
    if config.normalization == "LayerNorm":
        yield MegatronParameter(name + ".bias", (size,), "replicated")


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


def name_in_model(config: MegatronConfig, parameter: MegatronParameter, spec: LayerSpec = "local") -> str:
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


def name_in_torch_dist(
    config: MegatronConfig, parameter: MegatronParameter, spec: Literal["local", "te"] = "local"
) -> str:
    """Return a parameter's template in a torch_dist checkpoint that was written with that spec.

    Which layers and experts are stacked there: coalign_megatron.convert.torch_dist.
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
