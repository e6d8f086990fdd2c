"""Keys of ChatLearn and what they are called here, by dotted path, as its GRPO templates of 2025 have them.

Files of before 2025 are read by the same names: `runtime` is `runtime_args`, and `ppo_policy` is `policy_trainer`
(`chatlearn_source.py`).
"""

from __future__ import annotations

from coalign_migrate.keys.foreign_keys import POLICY, SAMPLING, TRAINER, VALUE, ForeignKeys

RUNTIME, ROLLOUT, LEARNER = "runtime_args", "models.policy", "models.policy_trainer"
OLD_NAMES = {"ppo_policy": "policy_trainer", "ppo_value": "value_trainer", "reference": "ref_policy"}
_MODELS = ("policy", "policy_trainer", "ref_policy", "reward", "value", "value_trainer")
_MICRO = "micro-batches follow from models.trainer.max_tokens_per_micro"
_MEMORY = "models that share a device leave it by themselves (docs/memory.md)"
_RESUMED = "the same command goes on from the newest checkpoint in the run folder"
_LOGS = "logs and metrics are in the run folder (`output`)"
_SYNC = "the weight sync chooses its transport by placement (docs/weight_sync.md)"
_REFERENCE = "the reference is like the trainer"
_TRAINER_ONLY = "the run's own steps decide when it saves and logs"

_UNNEEDED_OF_MODELS = {
    "num_gpu": "num_gpu is auto: the models share in turn the GPUs that are there",
    "num_cpu": "reward functions run in processes of their own on the CPU",
    "cpu_per_process": "reward functions run in processes of their own on the CPU",
    "gpu_per_process": "a trainer has one process for each GPU, an engine one for each replica",
    "num_replica": "replicas follow from num_gpu and the parallel sizes",
    "trainable": "what a model does follows from its role in the recipe",
    "generation_batch_size": "engines and scorers fill their batches by tokens",
    "batch_generation.ranking": "engines fill their batches by tokens",
    "batch_generation.min_prompt_length": "engines fill their batches by tokens",
    "free_memory": _MEMORY,
    "force_free_memory": _MEMORY,
    "offload_weights": _MEMORY,
    "offload_optimizer_states": _MEMORY,
    "free_grad_buffers": _MEMORY,
    "free_gpu_memory.offload_weights": _MEMORY,
    "free_gpu_memory.offload_optimizer_states": _MEMORY,
    "free_gpu_memory.free_grad_buffers": _MEMORY,
    "use_expandable_segments": "set PYTORCH_CUDA_ALLOC_CONF in the environment, where it is wanted",
    "meta_init": "each rank reads its own part of the files",
    "groupgemm": "experts are computed by the fastest kernel of the backend",
    "packing": "sequences are packed wherever the architecture can",
    "tokenizer_type": "the model's own tokenizer is taken",
    "tokenizer_model": "the model's own tokenizer is taken",
    "fsdp_size": "weights are sharded over all processes of a model",
}

_CUTS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
_CUTS += ("expert_tensor_parallel_size", "ulysses_sequence_parallel_size", "moe_router_force_load_balancing")
_CUTS += ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")

_OPTIMIZER = {"lr": "lr", "weight_decay": "weight_decay", "clip_grad": "clip_grad_norm"}

CHATLEARN = ForeignKeys(
    "ChatLearn",
    inputs=("`models.policy.load`", "`runtime_args.data_path`"),
    same={
        f"{RUNTIME}.num_episode": "runtime.steps",
        f"{RUNTIME}.num_training_epoch": f"{TRAINER}.epochs_per_batch",
        f"{RUNTIME}.save_episode_interval": "runtime.save_every",
        f"{RUNTIME}.eval_episode_interval": "runtime.eval_every",
        f"{RUNTIME}.enable_eval_before_training": "runtime.eval_at_start",
        f"{RUNTIME}.eval_data_num_limit": "runtime.eval_prompts",
        f"{RUNTIME}.data_shuffle": "data.shuffle",
        f"{RUNTIME}.output_dir": "output",
        f"{RUNTIME}.train_backend": f"{TRAINER}.module",
        f"{RUNTIME}.rollout_backend": f"{POLICY}.module",
        f"{ROLLOUT}.temperature": f"{SAMPLING}.temperature",
        f"{ROLLOUT}.top_p": f"{SAMPLING}.top_p",
        f"{ROLLOUT}.top_k": f"{SAMPLING}.top_k",
        f"{ROLLOUT}.eval_temperature": "runtime.eval_sampling.temperature",
        f"{ROLLOUT}.eval_top_p": "runtime.eval_sampling.top_p",
        f"{ROLLOUT}.eval_top_k": "runtime.eval_sampling.top_k",
        f"{ROLLOUT}.num_inference_per_prompt": "runtime.samples_per_prompt",
        f"{ROLLOUT}.max_prompt_tokens_length": "data.max_prompt_tokens",
        f"{ROLLOUT}.vllm_prompt_key": "data.prompt_key",
        f"{ROLLOUT}.tensor_model_parallel_size": f"{POLICY}.tensor_parallel",
        f"{ROLLOUT}.pipeline_model_parallel_size": f"{POLICY}.pipeline_parallel",
        f"{ROLLOUT}.gpu_memory_utilization": f"{POLICY}.vllm.gpu_memory_utilization",
        f"{ROLLOUT}.max_num_batched_tokens": f"{POLICY}.vllm.max_num_batched_tokens",
        f"{ROLLOUT}.enforce_eager": f"{POLICY}.vllm.enforce_eager",
        f"{LEARNER}.seed": "seed",
        **{f"{LEARNER}.optimizer.{name}": f"{TRAINER}.optimizer.{ours}" for name, ours in _OPTIMIZER.items()},
        **{f"{LEARNER}.{name}": f"{TRAINER}.optimizer.{ours}" for name, ours in _OPTIMIZER.items()},
        f"{LEARNER}.lr_decay_style": f"{TRAINER}.optimizer.schedule",
        f"{LEARNER}.lr_warmup_iters": f"{TRAINER}.optimizer.warmup",
        f"{LEARNER}.gradient_checkpointing": f"{TRAINER}.activation_checkpointing",
        f"{LEARNER}.tensor_model_parallel_size": f"{TRAINER}.tensor_parallel",
        f"{LEARNER}.pipeline_model_parallel_size": f"{TRAINER}.pipeline_parallel",
        f"{LEARNER}.expert_model_parallel_size": f"{TRAINER}.expert_parallel",
        f"{LEARNER}.ulysses_sequence_parallel_size": f"{TRAINER}.context_parallel",
        f"{LEARNER}.bf16": f"{TRAINER}.compute_dtype",
    },
    combined={
        f"{RUNTIME}.sample_per_episode": "runtime.prompts_per_step and runtime.samples_per_prompt",
        f"{RUNTIME}.train_global_batch_size": f"{TRAINER}.updates_per_batch (how many of them a batch makes)",
        f"{RUNTIME}.data_path": "data.train",
        f"{RUNTIME}.data_ratio": "data.train[].weight",
        f"{RUNTIME}.training_data_num_limit": "data.train[].max_samples",
        f"{RUNTIME}.eval_data_path": "data.eval",
        f"{RUNTIME}.colocation": "runtime.colocation",
        f"{RUNTIME}.enable_resume_training": "runtime.resume",
        f"{RUNTIME}.log_args_dict.enable_wandb": "runtime.trackers",
        f"{RUNTIME}.log_args_dict.enable_tensorboard": "runtime.trackers",
        f"{RUNTIME}.log_args_dict.wandb_project": "runtime.trackers[].project",
        f"{RUNTIME}.log_args_dict.wandb_name": "runtime.trackers[].run",
        f"{ROLLOUT}.load": f"{POLICY}.load",
        f"{ROLLOUT}.max_response_tokens_length": f"{SAMPLING}.max_new_tokens",
        f"{ROLLOUT}.max_new_tokens": f"{SAMPLING}.max_new_tokens",
        f"{ROLLOUT}.seq_length": f"data.max_prompt_tokens and {SAMPLING}.max_new_tokens",
        f"{ROLLOUT}.enable_thinking": "data.chat_template_kwargs",
        f"{ROLLOUT}.num_gpu": f"{POLICY}.num_gpu",
        f"{ROLLOUT}.presence_penalty": "no penalty: log-probs are those of the policy itself",
        f"{ROLLOUT}.frequency_penalty": "no penalty: log-probs are those of the policy itself",
        f"{ROLLOUT}.repetition_penalty": "no penalty: log-probs are those of the policy itself",
        f"{LEARNER}.load": f"{TRAINER}.load",
        f"{LEARNER}.num_gpu": f"{TRAINER}.num_gpu",
        f"{LEARNER}.max_token_in_packing": f"{TRAINER}.max_tokens_per_micro",
        f"{LEARNER}.optimizer.min_lr": f"{TRAINER}.optimizer.min_lr_ratio",
        f"{LEARNER}.min_lr": f"{TRAINER}.optimizer.min_lr_ratio",
        **{f"{LEARNER}.{name}": f"{TRAINER}.optimizer.betas" for name in ("adam_beta1", "adam_beta2")},
        **{f"{LEARNER}.optimizer.{name}": f"{TRAINER}.optimizer.betas" for name in ("adam_beta1", "adam_beta2")},
        f"{LEARNER}.pos_clip_ratio": "loss.clip_high",
        f"{LEARNER}.neg_clip_ratio": "loss.clip_low",
        f"{LEARNER}.final_clip_ratio": "loss.dual_clip (of the advantage, not of the loss)",
        f"{LEARNER}.entropy_coef": "loss.entropy_coef",
        f"{LEARNER}.kl_coef": "loss.kl_coef",
        f"{LEARNER}.use_group_sequence_policy": "algorithm: gspo",
        f"{LEARNER}.cliprange": "loss.clip_low and loss.clip_high",
        f"{LEARNER}.cliprange_value": f"{VALUE}.loss.clip",
        f"{LEARNER}.gamma": "advantage.gamma",
        f"{LEARNER}.lam": "advantage.lam",
        f"{LEARNER}.init_kl_coef": "kl.coef",
        f"{LEARNER}.fix_kl_coef": "kl.fn",
        f"{LEARNER}.recompute_granularity": f"{TRAINER}.activation_checkpointing",
        f"{LEARNER}.sequence_parallel": f"{TRAINER}.megatron.sequence_parallel",
        f"{LEARNER}.use_distributed_optimizer": f"{TRAINER}.megatron.distributed_optimizer",
        f"{LEARNER}.expert_tensor_parallel_size": f"{TRAINER}.megatron.expert_tensor_parallel",
        f"{LEARNER}.virtual_pipeline_model_parallel_size": f"{TRAINER}.megatron.virtual_pipeline",
        f"{LEARNER}.decoder_first_pipeline_num_layers": f"{TRAINER}.megatron.first_stage_layers",
        f"{LEARNER}.decoder_last_pipeline_num_layers": f"{TRAINER}.megatron.last_stage_layers",
        f"{LEARNER}.lora.enable_lora": f"{TRAINER}.lora",
        f"{LEARNER}.lora.lora_dim": f"{TRAINER}.lora.rank",
        f"{LEARNER}.lora.lora_scaling": f"{TRAINER}.lora.alpha",
        f"{LEARNER}.lora.lora_dropout": f"{TRAINER}.lora.dropout",
        f"{LEARNER}.trainer_engine": "algorithm",
        "models.ref_policy.load": "models.reference.load",
        "models.reward.load": "models.reward.load",
        "models.value_trainer.load": f"{VALUE}.load",
        "models.value_trainer.lr": f"{VALUE}.optimizer.lr",
    },
    unneeded={
        **{f"models.{model}.{key}": why for model in _MODELS for key, why in _UNNEEDED_OF_MODELS.items()},
        **{
            f"models.{model}.{key}": _REFERENCE
            for model in ("ref_policy", "reward", "value", "value_trainer")
            for key in ("seq_length", "bf16", "sequence_parallel", "max_token_in_packing", "sync_frequency")
        },
        **{f"models.ref_policy.{key}": _REFERENCE for key in _CUTS},
        f"{RUNTIME}.exp_name": "a run is called by its folder (`output`)",
        f"{RUNTIME}.train_micro_batch_size": _MICRO,
        f"{RUNTIME}.generation_batch_size": "engines and scorers fill their batches by tokens",
        f"{RUNTIME}.data_rerank": "batches are always balanced by tokens",
        f"{RUNTIME}.max_replay_episode": "advantages are those of a step's own groups; see `replay` for more",
        f"{RUNTIME}.max_relay_episode": "advantages are those of a step's own groups; see `replay` for more",
        f"{RUNTIME}.data_checkpoint_path": _RESUMED,
        f"{RUNTIME}.load_data_checkpoint_iteration": _RESUMED,
        f"{RUNTIME}.max_data_ckpt_nums": _RESUMED,
        f"{RUNTIME}.log_args_dict.log_dir": _LOGS,
        f"{RUNTIME}.log_args_dict.tensorboard_dir": _LOGS,
        f"{RUNTIME}.log_args_dict.wandb_dir": _LOGS,
        f"{RUNTIME}.log_args_dict.wandb_id": _LOGS,
        f"{RUNTIME}.log_args_dict.wandb_resume": _LOGS,
        f"{RUNTIME}.log_interval": "every step is logged",
        f"{RUNTIME}.debug": _LOGS,
        f"{RUNTIME}.concurrent_setup": "models are loaded side by side where they can be",
        f"{RUNTIME}.cpu_schedule_strategy": "processes on CPUs are spread (models.NAME.placement)",
        f"{RUNTIME}.bucket_size_mb_in_memory_manager": _SYNC,
        f"{RUNTIME}.validate_param_sync": "every sync is verified (sync.verify)",
        f"{RUNTIME}.sync_memory_optimization_level": _SYNC,
        f"{RUNTIME}.param_sync_comm_type": _SYNC,
        f"{RUNTIME}.param_sync_max_workers": _SYNC,
        f"{RUNTIME}.concurrent_comm": _SYNC,
        f"{RUNTIME}.coalesced_buffer_mb": _SYNC,
        **{
            f"{section}.{key}": "`coalign launch` says what travels with a job"
            for section in ("runtime_env", "env_args")
            for key in ("platform", "excludes", "pip", "working_dir", "py_modules")
        },
        f"{ROLLOUT}.max_seq_len_to_capture": "the engine chooses which lengths it captures",
        f"{ROLLOUT}.vllm_input_ids_key": "rows are tokenised by the run",
        f"{ROLLOUT}.enable_stage_resume": _RESUMED,
        f"{LEARNER}.diff_clip_ratio": "log-ratios are bounded where they would overflow",
        f"{LEARNER}.save_hf": "each checkpoint holds a Hugging Face directory",
        f"{LEARNER}.save": _TRAINER_ONLY,
        f"{LEARNER}.save_interval": _TRAINER_ONLY,
        f"{LEARNER}.log_interval": _TRAINER_ONLY,
        f"{LEARNER}.train_iters": _TRAINER_ONLY,
        f"{LEARNER}.seq_length": "data.max_prompt_tokens and max_new_tokens are for all models",
        f"{LEARNER}.lora.lora_layer": "adapters are on all linear layers",
        f"{LEARNER}.lora.column_only_qkv": "adapters are on all linear layers",
    },
    defaults={
        f"{RUNTIME}.sample_per_episode": 1000,
        f"{RUNTIME}.rollout_backend": "vllm",
        f"{RUNTIME}.eval_episode_interval": 0,
        f"{ROLLOUT}.num_inference_per_prompt": 32,
        f"{LEARNER}.optimizer.lr": 2e-6,
        f"{LEARNER}.optimizer.weight_decay": 0.01,
        f"{LEARNER}.bf16": True,
        f"{LEARNER}.pos_clip_ratio": 0.2,
        f"{LEARNER}.neg_clip_ratio": 0.2,
        f"{LEARNER}.cliprange": 0.2,
    },
)
