"""Plans which rank has what of a model, and lists the fields of megatron-core's configuration that Coalign sets.

megatron-core is not imported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from coalign.backends.megatron.weights import WeightPartition, choose_vocabulary_multiple
from coalign.config.schema import ModelConfig
from coalign.files import read_model_config
from coalign.weights import families
from coalign.weights.layouts.megatron import MegatronLayout, Mesh, split_layers
from coalign.weights.layouts.megatron_model import MegatronConfig

# Fields that MegatronConfig and megatron-core's configuration both have, with the same name and meaning.
ALWAYS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "normalization",
    "layernorm_epsilon",
    "layernorm_zero_centered_gamma",
    "qk_layernorm",
    "gated_linear_unit",
    "add_bias_linear",
    "add_qkv_bias",
    "rotary_interleaved",
    "window_size",
)
EXPERTS = (
    "num_moe_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_topk_scaling_factor",
    "moe_router_enable_expert_bias",
)
LATENT = (
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "rotary_base",
)
# Fields that users must not set, and why.
MODEL, FIXED = "config.json of the model says it", "Coalign computes with a value of its own"
OWNED = {
    **dict.fromkeys((*ALWAYS, *EXPERTS, *LATENT, "moe_layer_freq", "activation_func", "rope_type"), MODEL),
    "tensor_model_parallel_size": "it is `tensor_parallel`",
    "pipeline_model_parallel_size": "it is `pipeline_parallel`",
    "virtual_pipeline_model_parallel_size": "it is `megatron.virtual_pipeline`",
    "context_parallel_size": "it is `context_parallel`",
    "expert_model_parallel_size": "it is `expert_parallel`",
    "expert_tensor_parallel_size": "it is `megatron.expert_tensor_parallel`",
    "sequence_parallel": "it is `megatron.sequence_parallel`",
    "num_layers_in_first_pipeline_stage": "it is `megatron.first_stage_layers`",
    "num_layers_in_last_pipeline_stage": "it is `megatron.last_stage_layers`",
    "deterministic_mode": "it is `deterministic`",
    "fp8": "it is `fp8`",
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "bf16", "fp16"), "it is `compute_dtype`"),
    **dict.fromkeys(("recompute_granularity", "recompute_method"), "it is `activation_checkpointing`"),
    "recompute_num_layers": "it is `megatron.recompute_num_layers`",
    "recompute_modules": "it is `megatron.recompute_modules`",
    **dict.fromkeys(
        ("variable_seq_lengths", "calculate_per_token_loss", "perform_initialization", "use_cpu_initialization"), FIXED
    ),
}


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """Degrees of parallelism. ``virtual``: chunks of layers in a pipeline stage."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    virtual: int = 1

    def mesh(self, ranks: int) -> Mesh:
        """Return the mesh of the weights, in which context-parallel ranks count as data-parallel: they have the same.

        Raises ValueError where the sizes do not divide the ranks.
        """
        together = self.tensor * self.pipeline * self.context
        if ranks % together:
            raise ValueError(
                f"{ranks} ranks do not divide by tensor_parallel × pipeline_parallel × context_parallel = {together}"
            )
        data = ranks // (self.tensor * self.pipeline)
        return Mesh(self.tensor, self.pipeline, data, self.expert, self.expert_tensor)


def read_sizes(config: ModelConfig) -> ParallelSizes:
    own = config.megatron
    return ParallelSizes(
        config.tensor_parallel,
        config.pipeline_parallel,
        config.context_parallel,
        config.expert_parallel,
        own.expert_tensor_parallel or config.tensor_parallel,
        own.virtual_pipeline,
    )


def check_recomputed(model: MegatronConfig, modules: Sequence[str]) -> None:
    """Raise ValueError for ``modules`` to recompute in backward that Coalign's layers do not have."""
    key = "megatron.recompute_modules has"
    if model.multi_latent_attention and "mla_up_proj" in modules:
        raise ValueError(f"{key} 'mla_up_proj', which attention over packed rows does not have")
    if model.parallel_residual != "none" and (lacking := {"layernorm", "mlp"}.intersection(modules)):
        raise ValueError(
            f"{key} {sorted(lacking)}, which layers whose attention and MLP read the same residual do not have"
        )


def partition_weights(config: ModelConfig, count: int, *, te: bool = False) -> WeightPartition:
    """Plan which rank of ``count`` has what of the model in ``config.load``. ``te``: with Transformer Engine's layers.

    Raises ValueError for an unknown architecture, for one that contradicts the configuration, and for sizes that do not
    divide.
    """
    hf = read_model_config(Path(str(config.load)))
    # The architecture names the head of the file; the configuration decides the head of this model.
    family = families.find_family(hf if config.head == "lm" else hf | {"architectures": None})
    model, sizes, own = family.config(hf), read_sizes(config), config.megatron
    found = {
        "swiglu": model.gated_linear_unit and model.activation_func == "silu",
        "position_embedding_type": model.position_embedding_type,
        "untie_embeddings_and_output_weights": not model.share_embeddings_and_output_weights,
        "add_bias_linear": model.add_bias_linear,
        "normalization": model.normalization,
    }
    for key, value in found.items():
        if (wanted := getattr(own, key)) not in (None, value):
            raise ValueError(f"megatron.{key} is {wanted}; the model in {config.load} has {value}")
    if config.activation_checkpointing == "selective" and not config.frozen:
        check_recomputed(model, own.recompute_modules)
    if config.head != "lm":
        model = replace(model, share_embeddings_and_output_weights=False)
    split = split_layers(
        model.num_layers, sizes.pipeline, sizes.virtual, first=own.first_stage_layers, last=own.last_stage_layers
    )
    layout = MegatronLayout(model, sizes.mesh(count), split, "te" if te else "local")
    return WeightPartition(family, layout, choose_vocabulary_multiple(model, sizes.tensor), scalar=config.head != "lm")
