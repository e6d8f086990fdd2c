"""Keys of other frameworks and what they are called here: a table, read by `coalign import-config` and by errors.

Errors also say what keys of earlier versions are called now.

verl 0.7 has paths, OpenRLHF 0.9 flags, TRL 1.16 arguments (those of transformers' TrainingArguments among them). What
several keys decide together is computed in `coalign/commands/foreign/`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from coalign.config.errors import Key

TRAINER, POLICY, VALUE = "models.trainer", "models.policy", "models.value"
SAMPLING = f"{POLICY}.sampling"
_MICRO = "micro-batches follow from models.trainer.max_tokens_per_micro"
_PLACED = "num_gpu is auto: the models share in turn the GPUs that are there"
_MEMORY = "models that share a device leave it by themselves (docs/memory.md)"
_PACKED = "sequences are packed wherever the architecture can"
_LOGGED = "every step is logged"


@dataclass(frozen=True)
class ForeignKeys:
    """The keys of one framework, or of one of its programs.

    ``same`` maps a key to the dotted keys here (separated by blanks) that take its value, ``combined`` one that counts
    together with others to a description, and ``unneeded`` one without a counterpart to the reason. ``defaults`` are
    the framework's own, where they change results and differ from Coalign's.
    """

    name: str
    same: Mapping[str, str]
    combined: Mapping[str, str]
    unneeded: Mapping[str, str]
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def describe(self, key: str) -> str | None:
        """Say what a key is called here, as a part of a sentence; None for an unknown one."""
        if key in self.same:
            return " and ".join(self.same[key].split())
        if key in self.unneeded:
            return f"not needed ({self.unneeded[key]})"
        return self.combined.get(key)


_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_VLLM = ("gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "enforce_eager")
_VLLM += ("enable_chunked_prefill", "enable_prefix_caching")

VERL = ForeignKeys(
    "verl",
    same={
        "data.train_files": "data.train",
        "data.val_files": "data.eval",
        "data.train_batch_size": "runtime.prompts_per_step",
        "data.prompt_key": "data.prompt_key",
        "data.max_prompt_length": "data.max_prompt_tokens",
        "data.max_response_length": f"{SAMPLING}.max_new_tokens",
        "data.shuffle": "data.shuffle",
        "data.seed": "seed",
        "data.apply_chat_template_kwargs": "data.chat_template_kwargs",
        f"{_MODEL}.path": f"{POLICY}.load",
        f"{_MODEL}.trust_remote_code": f"{POLICY}.trust_remote_code",
        f"{_MODEL}.enable_gradient_checkpointing": f"{TRAINER}.activation_checkpointing",
        f"{_ACTOR}.strategy": f"{TRAINER}.module",
        f"{_ACTOR}.optim.lr": f"{TRAINER}.optimizer.lr",
        f"{_ACTOR}.optim.weight_decay": f"{TRAINER}.optimizer.weight_decay",
        f"{_ACTOR}.optim.betas": f"{TRAINER}.optimizer.betas",
        f"{_ACTOR}.optim.lr_warmup_steps": f"{TRAINER}.optimizer.warmup",
        f"{_ACTOR}.optim.lr_scheduler_type": f"{TRAINER}.optimizer.schedule",
        f"{_ACTOR}.optim.warmup_style": f"{TRAINER}.optimizer.schedule",
        f"{_ACTOR}.optim.min_lr_ratio": f"{TRAINER}.optimizer.min_lr_ratio",
        f"{_ACTOR}.grad_clip": f"{TRAINER}.optimizer.clip_grad_norm",
        f"{_ACTOR}.ppo_epochs": f"{TRAINER}.epochs_per_batch",
        f"{_ACTOR}.ppo_max_token_len_per_gpu": f"{TRAINER}.max_tokens_per_micro",
        f"{_ACTOR}.ulysses_sequence_parallel_size": f"{TRAINER}.context_parallel",
        f"{_ACTOR}.megatron.tensor_model_parallel_size": f"{TRAINER}.tensor_parallel",
        f"{_ACTOR}.megatron.pipeline_model_parallel_size": f"{TRAINER}.pipeline_parallel",
        f"{_ACTOR}.megatron.context_parallel_size": f"{TRAINER}.context_parallel",
        f"{_ACTOR}.megatron.expert_model_parallel_size": f"{TRAINER}.expert_parallel",
        f"{_ROLLOUT}.name": f"{POLICY}.module",
        f"{_ROLLOUT}.n": "runtime.samples_per_prompt",
        f"{_ROLLOUT}.temperature": f"{SAMPLING}.temperature",
        f"{_ROLLOUT}.top_p": f"{SAMPLING}.top_p",
        f"{_ROLLOUT}.top_k": f"{SAMPLING}.top_k",
        f"{_ROLLOUT}.tensor_model_parallel_size": f"{POLICY}.tensor_parallel",
        f"{_ROLLOUT}.pipeline_model_parallel_size": f"{POLICY}.pipeline_parallel",
        f"{_ROLLOUT}.enable_rollout_routing_replay": "rollout.routing_replay",
        **{f"{_ROLLOUT}.{name}": f"{POLICY}.vllm.{name}" for name in _VLLM},
        f"{_ROLLOUT}.val_kwargs.n": "runtime.eval_samples",
        f"{_ROLLOUT}.val_kwargs.top_p": "runtime.eval_sampling.top_p",
        f"{_ROLLOUT}.val_kwargs.top_k": "runtime.eval_sampling.top_k",
        "trainer.total_epochs": "runtime.epochs",
        "trainer.total_training_steps": "runtime.steps",
        "trainer.save_freq": "runtime.save_every",
        "trainer.test_freq": "runtime.eval_every",
        "trainer.val_before_train": "runtime.eval_at_start",
        "trainer.max_actor_ckpt_to_keep": "runtime.keep",
        "trainer.default_local_dir": "output",
        "trainer.resume_mode": "runtime.resume",
        "trainer.logger": "runtime.trackers",
    },
    combined={
        "algorithm.adv_estimator": "algorithm and advantage.fn",
        "algorithm.gamma": "advantage.gamma",
        "algorithm.lam": "advantage.lam",
        "algorithm.norm_adv_by_std_in_grpo": "advantage.scale",
        "algorithm.use_kl_in_reward": "kl",
        "algorithm.kl_ctrl.type": "kl.fn",
        "algorithm.kl_ctrl.kl_coef": "kl.coef",
        "algorithm.kl_ctrl.target_kl": "kl.target",
        "algorithm.kl_ctrl.horizon": "kl.horizon",
        "algorithm.filter_groups.enable": "filter",
        "algorithm.filter_groups.metric": "filter",
        "algorithm.filter_groups.max_num_gen_batches": "filter.max_rounds",
        "algorithm.rollout_correction.rollout_is": "loss.is_level",
        "algorithm.rollout_correction.rollout_is_threshold": "loss.is_high",
        "data.filter_overlong_prompts": "data.on_long",
        "data.truncation": "data.on_long",
        f"{_MODEL}.lora_rank": f"{TRAINER}.lora.rank",
        f"{_MODEL}.lora_alpha": f"{TRAINER}.lora.alpha",
        f"{_MODEL}.target_modules": f"{TRAINER}.lora.target",
        f"{_ACTOR}.optim.lr_warmup_steps_ratio": f"{TRAINER}.optimizer.warmup (in steps)",
        f"{_ACTOR}.ppo_mini_batch_size": f"{TRAINER}.updates_per_batch (how many of them a batch makes)",
        f"{_ACTOR}.clip_ratio": "loss.clip_low and loss.clip_high",
        f"{_ACTOR}.clip_ratio_low": "loss.clip_low",
        f"{_ACTOR}.clip_ratio_high": "loss.clip_high",
        f"{_ACTOR}.clip_ratio_c": "loss.dual_clip",
        f"{_ACTOR}.tau_pos": "loss.tau_pos",
        f"{_ACTOR}.tau_neg": "loss.tau_neg",
        f"{_ACTOR}.loss_agg_mode": "loss.aggregation",
        f"{_ACTOR}.loss_scale_factor": "loss.constant_length",
        f"{_ACTOR}.policy_loss.loss_mode": "algorithm and loss.fn",
        f"{_ACTOR}.entropy_coeff": "loss.entropy_coef",
        f"{_ACTOR}.use_kl_loss": "loss.kl_coef",
        f"{_ACTOR}.kl_loss_coef": "loss.kl_coef",
        f"{_ACTOR}.kl_loss_type": "loss.kl_estimator",
        f"{_ROLLOUT}.val_kwargs.temperature": "runtime.eval_sampling.temperature",
        f"{_ROLLOUT}.val_kwargs.do_sample": "runtime.eval_sampling.temperature",
        "actor_rollout_ref": "models.policy, models.trainer, models.reference and rollout",
        "critic.model.path": f"{VALUE}.load",
        "critic.optim.lr": f"{VALUE}.optimizer.lr",
        "critic.optim.weight_decay": f"{VALUE}.optimizer.weight_decay",
        "critic.ppo_epochs": f"{VALUE}.epochs_per_batch",
        "critic.ppo_mini_batch_size": f"{VALUE}.updates_per_batch",
        "critic.cliprange_value": f"{VALUE}.loss.clip",
        "critic": VALUE,
        "algorithm": "the name of a recipe, such as `algorithm: grpo`",
        "custom_reward_function.path": "reward.fn (my.module:function)",
        "custom_reward_function.name": "reward.fn (my.module:function)",
        "custom_reward_function": "reward.fn (my.module:function)",
        "reward_model.enable": "models.reward",
        "reward_model.model.path": "models.reward.load",
        "reward_model.overlong_buffer.enable": "reward: [{fn: length_penalty}]",
        "reward_model.overlong_buffer.len": "reward: [{fn: length_penalty, buffer}]",
        "reward_model.overlong_buffer.penalty_factor": "reward: [{fn: length_penalty, weight}]",
        "reward.custom_reward_function.path": "reward.fn (my.module:function)",
        "reward.custom_reward_function.name": "reward.fn (my.module:function)",
        "reward.reward_model.enable": "models.reward",
        "reward.reward_model.model_path": "models.reward.load",
        "trainer.critic_warmup": f"{TRAINER}.learns_after",
        "trainer.project_name": "runtime.trackers[].project",
        "trainer.experiment_name": "runtime.trackers[].run",
        "trainer": "runtime",
    },
    unneeded={
        f"{_ACTOR}.ppo_micro_batch_size": _MICRO,
        f"{_ACTOR}.ppo_micro_batch_size_per_gpu": _MICRO,
        f"{_ACTOR}.use_dynamic_bsz": _MICRO,
        f"{_ACTOR}.fsdp_config.param_offload": _MEMORY,
        f"{_ACTOR}.fsdp_config.optimizer_offload": _MEMORY,
        "actor_rollout_ref.ref.fsdp_config.param_offload": _MEMORY,
        "actor_rollout_ref.ref.log_prob_micro_batch_size": _MICRO,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": _MICRO,
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": _MICRO,
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": _MICRO,
        f"{_ROLLOUT}.log_prob_micro_batch_size": _MICRO,
        f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": _MICRO,
        f"{_ROLLOUT}.log_prob_use_dynamic_bsz": _MICRO,
        f"{_ROLLOUT}.log_prob_max_token_len_per_gpu": _MICRO,
        f"{_ROLLOUT}.free_cache_engine": _MEMORY,
        f"{_ROLLOUT}.prompt_length": "data.max_prompt_tokens is for all models",
        f"{_ROLLOUT}.response_length": "models.policy.sampling.max_new_tokens is for all models",
        f"{_ROLLOUT}.mode": "the engine is always asynchronous inside",
        f"{_ROLLOUT}.load_format": "weights come by the weight sync",
        f"{_MODEL}.use_remove_padding": _PACKED,
        f"{_MODEL}.use_shm": "weights are read as they are needed",
        "actor_rollout_ref.hybrid_engine": _PLACED,
        "critic.ppo_micro_batch_size": _MICRO,
        "critic.ppo_micro_batch_size_per_gpu": _MICRO,
        "critic.model.use_remove_padding": _PACKED,
        "critic.model.enable_gradient_checkpointing": "the value model is like the trainer",
        "critic.model.fsdp_config.param_offload": _MEMORY,
        "critic.model.fsdp_config.optimizer_offload": _MEMORY,
        "reward_model.reward_manager": "rewards are the functions that `reward` lists",
        "trainer.n_gpus_per_node": _PLACED,
        "trainer.nnodes": _PLACED,
        "trainer.balance_batch": "batches are always balanced by tokens",
        "trainer.device": "the accelerator that is there is used",
    },
    defaults={
        "data.train_batch_size": 1024,
        "data.max_prompt_length": 512,
        "data.max_response_length": 512,
        f"{_ACTOR}.optim.weight_decay": 0.01,
        f"{_ACTOR}.ppo_mini_batch_size": 256,
        f"{_ACTOR}.clip_ratio": 0.2,
        f"{_ACTOR}.clip_ratio_c": 3.0,
        f"{_ROLLOUT}.n": 1,
        "algorithm.adv_estimator": "gae",
        "algorithm.gamma": 1.0,
        "algorithm.lam": 1.0,
        "critic.optim.lr": 1e-5,
        "critic.cliprange_value": 0.5,
        "trainer.total_epochs": 30,
    },
)

_OPENRLHF_SAME = {
    "save_path": "output",
    "seed": "seed",
    "eval_steps": "runtime.eval_every",
    "save_steps": "runtime.save_every",
    "max_ckpt_num": "runtime.keep",
    "max_norm": f"{TRAINER}.optimizer.clip_grad_norm",
    "l2": f"{TRAINER}.optimizer.weight_decay",
    "adam_betas": f"{TRAINER}.optimizer.betas",
    "lr_scheduler": f"{TRAINER}.optimizer.schedule",
    "gradient_checkpointing": f"{TRAINER}.activation_checkpointing",
    "bf16": f"{TRAINER}.compute_dtype",
    "param_dtype": f"{TRAINER}.compute_dtype",
    "aux_loss_coef": f"{TRAINER}.router_aux_loss_coef",
    "adam_offload": f"{TRAINER}.deepspeed.offload_optimizer",
    "zero_stage": f"{TRAINER}.deepspeed.stage",
    "ds_tensor_parallel_size": f"{TRAINER}.tensor_parallel",
    "ring_attn_size": f"{TRAINER}.context_parallel",
    "train_max_tokens_per_gpu": f"{TRAINER}.max_tokens_per_micro",
    "prompt_key": "data.prompt_key",
    "chosen_key": "data.chosen_key",
    "rejected_key": "data.rejected_key",
}
_OPENRLHF_COMBINED = {
    "lr_warmup_ratio": f"{TRAINER}.optimizer.warmup (in steps)",
    "lora_rank": f"{TRAINER}.lora.rank",
    "lora_alpha": f"{TRAINER}.lora.alpha",
    "lora_dropout": f"{TRAINER}.lora.dropout",
    "target_modules": f"{TRAINER}.lora.target",
    "load_in_4bit": f"{TRAINER}.lora.base_bits",
    "apply_chat_template": "data.chat_template",
    "input_template": "data.prompt_format",
    "max_samples": "data.train[].max_samples",
    "use_wandb": "runtime.trackers",
    "wandb_project": "runtime.trackers[].project",
    "wandb_run_name": "runtime.trackers[].run",
    "use_tensorboard": "runtime.trackers",
    "enable_ema": f"{TRAINER}.ema",
    "ema_beta": f"{TRAINER}.ema.decay",
}
_OPENRLHF_UNNEEDED = {
    "micro_train_batch_size": _MICRO,
    "micro_rollout_batch_size": _MICRO,
    "use_dynamic_batch": _MICRO,
    "rollout_max_tokens_per_gpu": _MICRO,
    "packing_samples": _PACKED,
    "flash_attn": "the fastest attention that the machine has is taken (models.NAME.attention)",
    "attn_implementation": "the fastest attention that the machine has is taken (models.NAME.attention)",
    "logging_steps": _LOGGED,
    "ckpt_path": "checkpoints are in the run folder (`output`)",
    "save_hf_ckpt": "each checkpoint holds a Hugging Face directory",
    "load_checkpoint": "the same command goes on from the newest checkpoint",
    "disable_ds_ckpt": "checkpoints are always complete",
    "local_rank": _PLACED,
    "disable_fast_tokenizer": "the model's own tokenizer is taken",
    "gradient_checkpointing_use_reentrant": "checkpointing is never re-entrant",
    "zpg": "for ZeRO++, use models.trainer.deepspeed.zero",
    "overlap_comm": "for DeepSpeed, use models.trainer.deepspeed.zero",
}

OPENRLHF = ForeignKeys(
    "OpenRLHF",
    same={
        **_OPENRLHF_SAME,
        "rollout_batch_size": "runtime.prompts_per_step",
        "n_samples_per_prompt": "runtime.samples_per_prompt",
        "num_episodes": "runtime.epochs",
        "max_epochs": f"{TRAINER}.epochs_per_batch",
        "prompt_max_len": "data.max_prompt_tokens",
        "generate_max_len": f"{SAMPLING}.max_new_tokens",
        "temperature": f"{SAMPLING}.temperature",
        "top_p": f"{SAMPLING}.top_p",
        "actor_learning_rate": f"{TRAINER}.optimizer.lr",
        "input_key": "data.prompt_key",
        "eval_temperature": "runtime.eval_sampling.temperature",
        "eval_n_samples_per_prompt": "runtime.eval_samples",
        "vllm_tensor_parallel_size": f"{POLICY}.tensor_parallel",
        "vllm_gpu_memory_utilization": f"{POLICY}.vllm.gpu_memory_utilization",
        "enable_prefix_caching": f"{POLICY}.vllm.enable_prefix_caching",
        "enforce_eager": f"{POLICY}.vllm.enforce_eager",
    },
    combined={
        **_OPENRLHF_COMBINED,
        "pretrain": f"{POLICY}.load",
        "critic_pretrain": f"{VALUE}.load",
        "critic_learning_rate": f"{VALUE}.optimizer.lr",
        "value_clip": f"{VALUE}.loss.clip",
        "freezing_actor_steps": f"{TRAINER}.learns_after",
        "reward_pretrain": "models.reward.load",
        "remote_rm_url": "reward: [{fn: remote, url}]",
        "label_key": "data.answer_key",
        "normalize_reward": "reward[].normalise",
        "reward_clip_range": "reward[].clip",
        "overlong_buffer_len": "reward: [{fn: length_penalty, buffer}]",
        "overlong_penalty_factor": "reward: [{fn: length_penalty, weight}]",
        "prompt_data": "data.train",
        "prompt_data_probs": "data.train[].weight",
        "prompt_split": "data.train (a dataset's split: `org/name:config:split`)",
        "eval_dataset": "data.eval",
        "eval_split": "data.eval (a dataset's split: `org/name:config:split`)",
        "advantage_estimator": "algorithm and advantage.fn",
        "policy_loss_type": "algorithm",
        "no_advantage_std_norm": "advantage.scale",
        "gamma": "advantage.gamma",
        "lambd": "advantage.lam",
        "init_kl_coef": "kl.coef",
        "kl_target": "kl.target",
        "kl_horizon": "kl.horizon",
        "use_kl_loss": "loss.kl_coef",
        "kl_estimator": "loss.kl_estimator",
        "eps_clip": "loss.clip_low and loss.clip_high",
        "eps_clip_low_high": "loss.clip_low and loss.clip_high",
        "dual_clip": "loss.dual_clip",
        "entropy_loss_coef": "loss.entropy_coef",
        "enable_vllm_is_correction": "loss.is_level",
        "vllm_is_truncated_threshold": "loss.is_high",
        "train_batch_size": f"{TRAINER}.updates_per_batch (how many of them a batch makes)",
        "dynamic_filtering": "filter",
        "dynamic_filtering_reward_range": "filter.low and filter.high",
        "vllm_num_engines": f"{POLICY}.module",
        "async_train": "runtime.max_staleness",
        "async_queue_size": "runtime.max_staleness",
    },
    unneeded={
        **_OPENRLHF_UNNEEDED,
        **{
            f"{model}_{size}": _PLACED
            for model in ("actor", "ref", "reward", "critic")
            for size in ("num_nodes", "num_gpus_per_node")
        },
        "colocate_all_models": _PLACED,
        "colocate_actor_ref": _PLACED,
        "colocate_critic_reward": _PLACED,
        "vllm_sync_backend": "sync.transport is chosen by placement",
        "vllm_sync_with_ray": "sync.transport is chosen by placement",
        "vllm_enable_sleep": _MEMORY,
        "deepspeed_enable_sleep": _MEMORY,
        "ref_reward_offload": _MEMORY,
        "save_value_network": "checkpoints hold every trained model",
        "value_head_prefix": "heads are found by their shape",
        "vllm_generate_batch_size": "the engine takes as many as it can hold",
    },
    defaults={
        "rollout_batch_size": 1024,
        "train_batch_size": 128,
        "n_samples_per_prompt": 1,
        "num_episodes": 1,
        "prompt_max_len": 1024,
        "generate_max_len": 1024,
        "advantage_estimator": "gae",
        "critic_learning_rate": 9e-6,
        "adam_betas": (0.9, 0.95),
        "lr_scheduler": "cosine_with_min_lr",
        "lambd": 1.0,
        "gamma": 1.0,
        "init_kl_coef": 0.01,
        "eps_clip": 0.2,
        "value_clip": 0.5,
        "input_key": "input",
    },
)

OPENRLHF_OFFLINE = ForeignKeys(
    "OpenRLHF",
    same={
        **_OPENRLHF_SAME,
        "train_batch_size": "runtime.prompts_per_step",
        "max_epochs": "runtime.epochs",
        "learning_rate": f"{TRAINER}.optimizer.lr",
        "max_len": "data.max_tokens",
        "input_key": "data.prompt_key",
        "output_key": "data.answer_key",
        "label_key": "data.label_key",
    },
    combined={
        **_OPENRLHF_COMBINED,
        "pretrain": f"{TRAINER}.load",
        "ref_pretrain": "models.reference.load",
        "dataset": "data.train",
        "dataset_probs": "data.train[].weight",
        "eval_dataset": "data.eval",
        "train_split": "data.train (a dataset's split: `org/name:config:split`)",
        "eval_split": "data.eval (a dataset's split: `org/name:config:split`)",
        "pretrain_mode": "algorithm: pretrain",
        "beta": "loss.beta",
        "ipo": "loss.fn: ipo",
        "label_smoothing": "loss.label_smoothing",
        "nll_loss_coef": "loss.nll_coef",
    },
    unneeded={**_OPENRLHF_UNNEEDED, "ref_offload": _MEMORY},
    defaults={"train_batch_size": 128, "adam_betas": (0.9, 0.95)},
)

_TRL_SAME = {
    "output_dir": "output",
    "seed": "seed",
    "learning_rate": f"{TRAINER}.optimizer.lr",
    "lr_scheduler_type": f"{TRAINER}.optimizer.schedule",
    "warmup_steps": f"{TRAINER}.optimizer.warmup",
    "weight_decay": f"{TRAINER}.optimizer.weight_decay",
    "max_grad_norm": f"{TRAINER}.optimizer.clip_grad_norm",
    "num_train_epochs": "runtime.epochs",
    "max_steps": "runtime.steps",
    "gradient_checkpointing": f"{TRAINER}.activation_checkpointing",
    "bf16": f"{TRAINER}.compute_dtype",
    "save_steps": "runtime.save_every",
    "eval_steps": "runtime.eval_every",
    "save_total_limit": "runtime.keep",
    "report_to": "runtime.trackers",
    "trust_remote_code": "models.NAME.trust_remote_code",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_length": "data.max_tokens",
    "max_seq_length": "data.max_tokens",
    "dataset_text_field": "data.text_key",
    "chat_template_kwargs": "data.chat_template_kwargs",
    "num_generations": "runtime.samples_per_prompt",
    "max_completion_length": f"{SAMPLING}.max_new_tokens",
    "temperature": f"{SAMPLING}.temperature",
    "top_p": f"{SAMPLING}.top_p",
    "top_k": f"{SAMPLING}.top_k",
    "min_p": f"{SAMPLING}.min_p",
    "repetition_penalty": f"{SAMPLING}.repetition_penalty",
    "num_iterations": f"{TRAINER}.epochs_per_batch",
    "vllm_gpu_memory_utilization": f"{POLICY}.vllm.gpu_memory_utilization",
    "vllm_max_model_length": f"{POLICY}.vllm.max_model_len",
    "vllm_tensor_parallel_size": f"{POLICY}.tensor_parallel",
}

TRL = ForeignKeys(
    "TRL",
    same=_TRL_SAME,
    combined={
        "model_name_or_path": "models.NAME.load",
        "adam_beta1": f"{TRAINER}.optimizer.betas",
        "adam_beta2": f"{TRAINER}.optimizer.betas",
        "warmup_ratio": f"{TRAINER}.optimizer.warmup (in steps)",
        "per_device_train_batch_size": "runtime.prompts_per_step (rows of a step on all devices; micro-batches follow "
        "from models.trainer.max_tokens_per_micro)",
        "gradient_accumulation_steps": "runtime.prompts_per_step (rows of a step; micro-batches follow from "
        "models.trainer.max_tokens_per_micro)",
        "steps_per_generation": f"{TRAINER}.updates_per_batch",
        "generation_batch_size": "runtime.prompts_per_step",
        "num_processes": "models.NAME.num_gpu",
        "dataset_name": "data.train",
        "dataset_config": "data.train (`org/name:config:split`)",
        "dataset_train_split": "data.train (`org/name:config:split`)",
        "dataset_test_split": "data.eval (`org/name:config:split`)",
        "train_dataset": "data.train",
        "eval_dataset": "data.eval",
        "eval_strategy": "runtime.eval_every",
        "save_strategy": "runtime.save_every",
        "beta": "loss.beta (DPO and its relatives), loss.kl_coef (GRPO) or kl.coef (PPO)",
        "label_smoothing": "loss.label_smoothing",
        "epsilon": "loss.clip_low and loss.clip_high",
        "epsilon_high": "loss.clip_high",
        "delta": "loss.dual_clip",
        "loss_type": "loss.fn",
        "scale_rewards": "advantage.scale",
        "importance_sampling_level": "algorithm: gspo",
        "mask_truncated_completions": "truncated: mask_truncated",
        "reward_funcs": "reward",
        "reward_weights": "reward[].weight",
        "reward_model_name_or_path": "models.reward.load",
        "ref_model": "models.reference.load",
        "use_vllm": "models.policy.module: vllm",
        "vllm_mode": "models.policy.module: vllm",
        "vllm_importance_sampling_correction": "loss.is_level",
        "vllm_importance_sampling_mode": "loss.is_level and loss.is_mode",
        "vllm_importance_sampling_cap": "loss.is_high",
        "desirable_weight": "loss.desirable_weight",
        "undesirable_weight": "loss.undesirable_weight",
        "center_rewards_coefficient": "loss.centre_coef",
        "assistant_only_loss": "data.train_on",
        "use_peft": f"{TRAINER}.lora",
        "lora_r": f"{TRAINER}.lora.rank",
        "lora_alpha": f"{TRAINER}.lora.alpha",
        "lora_dropout": f"{TRAINER}.lora.dropout",
        "lora_target_modules": f"{TRAINER}.lora.target",
        "use_rslora": f"{TRAINER}.lora.rslora",
        "use_dora": f"{TRAINER}.lora.dora",
        "load_in_4bit": f"{TRAINER}.lora.base_bits",
    },
    unneeded={
        "logging_steps": _LOGGED,
        "logging_first_step": _LOGGED,
        "logging_strategy": _LOGGED,
        "log_completions": "samples.jsonl has samples of every step (runtime.log_samples)",
        "packing": _PACKED,
        "padding_free": _PACKED,
        "per_device_eval_batch_size": _MICRO,
        "gradient_checkpointing_kwargs": "checkpointing is never re-entrant",
        "attn_implementation": "the fastest attention that the machine has is taken (models.NAME.attention)",
        "dtype": "weights are float32 in the optimizer, and compute_dtype multiplies",
        "torch_dtype": "weights are float32 in the optimizer, and compute_dtype multiplies",
        "remove_unused_columns": "rewards see the whole row",
        "dataloader_num_workers": "rows are tokenised before the first step",
        "vllm_enable_sleep_mode": _MEMORY,
        "push_to_hub": "the model is in the run folder (`output`/model)",
        "overwrite_output_dir": "runtime.resume: never moves an earlier run aside",
        "fsdp": "the module fsdp shards over all GPUs",
        "deepspeed": "models.trainer.module: deepspeed, where ZeRO is wanted",
    },
    defaults={"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_train_epochs": 3.0},
)

FRAMEWORKS = (VERL, OPENRLHF, OPENRLHF_OFFLINE, TRL)

_MOST = 3  # keys of a section that a message translates
# Keys of Coalign that have another name now, by their paths.
RENAMED = {"data.on_missing_key": "data.bad_rows"}


def describe_renaming(key: Key) -> str | None:
    """Say what a key of an earlier version is called now, as the end of a sentence; None for others."""
    new = RENAMED.get(".".join(map(str, key)))
    return None if new is None else f"is called {new} now"


def is_path_of_verl(key: Key, value: Any) -> bool:
    """Whether ``key``, or one of those below it, is exactly a key that verl has; such a path is no slip of the pen."""
    path = ".".join(map(str, key))
    return any("." in name and VERL.describe(name) is not None for name in _list_paths(path, value))


def translate_key(key: Key, value: Any) -> str | None:
    """Say what a key of TRL or verl, or those below it, are called here, as the end of a sentence; None for others."""
    path = ".".join(map(str, key))
    if found := VERL.describe(path):
        paths = [name for name in _list_paths(path, value) if name != path]
        below = [f"{name} is {said}" for name in paths if (said := VERL.describe(name))]
        return f"is verl's; here {', '.join(below[:_MOST]) or f'it is {found}'}"
    if key and (found := TRL.describe(str(key[-1]))):
        return f"is TRL's; here it is {found}"
    return None


def _list_paths(path: str, value: Any) -> Iterator[str]:
    """Yield the paths of all values at ``path`` and below that hold no further keys."""
    if not isinstance(value, dict):
        yield path
        return
    for name, item in value.items():
        yield from _list_paths(f"{path}.{name}", item)
