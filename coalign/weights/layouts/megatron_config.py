"""A Megatron model's configuration in megatron-core's terms: everything that decides what its weights mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary angles are scaled beyond the length that a model was first trained on.

    The fields are those of transformers' `rope_scaling`; a number that the kind does not use is None.
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

    It has no ``family`` (the table's name), has a function as ``activation_func``, no position embeddings `alibi` and
    `none`, and none of the fields under "not in megatron-core".
    """

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int  # of dense layers; of one of the two halves if gated
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
    add_bias_linear: bool = False  # of all linear layers (queries, keys and values too)
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
