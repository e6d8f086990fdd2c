"""Fields of megatron-core's configuration, by its names: those that Coalign sets. No megatron is imported here."""

# Fields of both, by the same name and with the same meaning.
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
# Fields that are said in another place, and where.
MODEL, WAY = "config.json of the model says it", "Coalign's way to compute needs its own value"
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
        ("variable_seq_lengths", "calculate_per_token_loss", "perform_initialization", "use_cpu_initialization"), WAY
    ),
}
