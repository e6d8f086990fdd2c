"""verl's trainer of conversations, `verl.trainer.sft_trainer`: its keys, and what several of them decide together."""

from __future__ import annotations

from typing import Any

from coalign_migrate.keys.foreign_keys import KERNELS, MEMORY, MICRO, PACKED, PLACED, TRAINER, ForeignKeys
from coalign_migrate.keys.verl import CONVERTED, MEGATRON, SHARDED
from coalign_migrate.translation import ForeignTranslation, list_values, name_data, set_adapter, set_trackers
from coalign_migrate.verl import set_engine, set_schedule, set_template_arguments

_TRANSFORMER = "engine.megatron.override_transformer_config"
VERL_SFT = ForeignKeys(
    "verl",
    inputs=("`model.path`", "`data.train_files`"),
    same={
        "data.train_batch_size": "runtime.prompts_per_step",
        "data.messages_key": "data.messages_key",
        "data.tools_key": "data.tools_key",
        "data.prompt_key": "data.prompt_key",
        "data.response_key": "data.answer_key",
        "data.max_length": "data.max_tokens",
        "data.shuffle": "data.shuffle",
        "data.max_token_len_per_gpu": f"{TRAINER}.max_tokens_per_micro",
        "model.path": f"{TRAINER}.load",
        "model.tokenizer_path": f"{TRAINER}.tokenizer",
        "model.trust_remote_code": f"{TRAINER}.trust_remote_code",
        "model.enable_gradient_checkpointing": f"{TRAINER}.activation_checkpointing",
        "engine.ulysses_sequence_parallel_size": f"{TRAINER}.context_parallel",
        "engine.megatron.tensor_model_parallel_size": f"{TRAINER}.tensor_parallel",
        "engine.megatron.pipeline_model_parallel_size": f"{TRAINER}.pipeline_parallel",
        "engine.megatron.context_parallel_size": f"{TRAINER}.context_parallel",
        "engine.megatron.expert_model_parallel_size": f"{TRAINER}.expert_parallel",
        "optim.lr": f"{TRAINER}.optimizer.lr",
        "optim.betas": f"{TRAINER}.optimizer.betas",
        "optim.eps": f"{TRAINER}.optimizer.eps",
        "optim.weight_decay": f"{TRAINER}.optimizer.weight_decay",
        "optim.clip_grad": f"{TRAINER}.optimizer.clip_grad_norm",
        "optim.lr_warmup_steps": f"{TRAINER}.optimizer.warmup",
        "optim.lr_scheduler_type": f"{TRAINER}.optimizer.schedule",
        "optim.min_lr_ratio": f"{TRAINER}.optimizer.min_lr_ratio",
        "trainer.total_epochs": "runtime.epochs",
        "trainer.total_training_steps": "runtime.steps",
        "trainer.save_freq": "runtime.save_every",
        "trainer.test_freq": "runtime.eval_every",
        "trainer.max_ckpt_to_keep": "runtime.keep",
        "trainer.seed": "seed",
        "trainer.default_local_dir": "output",
        "trainer.resume_mode": "runtime.resume",
        "trainer.logger": "runtime.trackers",
    },
    combined={
        "data.train_files": "data.train",
        "data.val_files": "data.eval",
        "data.apply_chat_template_kwargs.*": "data.chat_template_kwargs",
        "data.train_max_samples": "data.train[].max_samples",
        "data.prompt_field": "data.train[].keys",
        "data.response_field": "data.train[].keys",
        "data.truncation": "data.on_long",
        "model.lora_rank": f"{TRAINER}.lora.rank",
        "model.lora_alpha": f"{TRAINER}.lora.alpha",
        "model.target_modules": f"{TRAINER}.lora.target",
        "engine.strategy": f"{TRAINER}.module",
        **{f"engine.megatron.{theirs}": f"{TRAINER}.megatron.{ours}" for theirs, ours in MEGATRON.items()},
        f"{_TRANSFORMER}.recompute_granularity": f"{TRAINER}.activation_checkpointing",
        f"{_TRANSFORMER}.moe_aux_loss_coeff": f"{TRAINER}.router_aux_loss_coef",
        f"{_TRANSFORMER}.moe_z_loss_coeff": f"{TRAINER}.router_z_loss_coef",
        "engine.fsdp_config.mixed_precision.param_dtype": f"{TRAINER}.compute_dtype",
        "engine.fsdp_config.dtype": f"{TRAINER}.compute_dtype",
        "engine.fsdp_config.model_dtype": f"{TRAINER}.dtype",
        "engine.megatron.dtype": f"{TRAINER}.compute_dtype",
        "optim.lr_warmup_steps_ratio": f"{TRAINER}.optimizer.warmup (in steps)",
        "optim.min_lr": f"{TRAINER}.optimizer.min_lr_ratio",
        "trainer.project_name": "runtime.trackers[].project",
        "trainer.experiment_name": "runtime.trackers[].run",
    },
    unneeded={
        "data.micro_batch_size*": MICRO,
        "data.use_dynamic_bsz": MICRO,
        "data.pad_mode": PACKED,
        "data.balance_dp_token": "batches are always balanced by tokens",
        "data.multiturn.enable": "rows with messages are conversations of any length",
        "data.num_workers": "rows are tokenised before they are needed",
        "data.use_shm": "weights are read as they are needed",
        "data.ignore_input_ids_mismatch": "each conversation is templated once",
        "model.use_*": PACKED,
        "engine.*_offload": MEMORY,
        "engine.offload_policy": MEMORY,
        "engine.fsdp_config.mixed_precision.*": "gradients are summed in float32",
        "engine.*mbridge": CONVERTED,
        "engine.*dist_checkpointing*": CONVERTED,
        f"{_TRANSFORMER}.recompute_*": "models.trainer.activation_checkpointing recomputes whole layers",
        f"{_TRANSFORMER}.*": KERNELS,
        "engine.*fsdp_size": SHARDED,
        "engine.reshard_after_forward": SHARDED,
        "engine.forward_prefetch": SHARDED,
        "engine.*": KERNELS,
        "optim": "the optimizer is AdamW in all engines",
        "optim.lr_warmup_init": "the warm-up begins at 0",
        "optim.lr_decay_steps": "the schedule lasts as long as the run",
        "optim.override_optimizer_config.*": MEMORY,
        "checkpoint.*": "checkpoints are always complete",
        "*profiler*": "runtime.profile, where profiles are wanted",
        "num_processes": PLACED,
        "trainer.n_gpus_per_node": PLACED,
        "trainer.nnodes": PLACED,
        "trainer.device": "the accelerator that is there is used",
        "trainer.balance_batch": "batches are always balanced by tokens",
        "hydra.*": "the run folder is `output`",
    },
    defaults={
        "data.train_batch_size": 256,
        "data.max_length": 1024,
        "data.truncation": "error",
        "model.enable_gradient_checkpointing": True,
        "optim.lr": 1e-3,
        "optim.weight_decay": 0.01,
        "optim.lr_scheduler_type": "constant",
        "trainer.total_epochs": 4,
        "trainer.seed": 1,
    },
    renamed={
        "engine": "engine.strategy",
        "data.multiturn.messages_key": "data.messages_key",
        "model.partial_pretrain": "model.path",
        "model.lora.rank": "model.lora_rank",
        "model.lora.alpha": "model.lora_alpha",
        "model.lora.target_modules": "model.target_modules",
        "model.strategy": "engine.strategy",
        "model.fsdp_config.model_dtype": "engine.fsdp_config.model_dtype",
        "ulysses_sequence_parallel_size": "engine.ulysses_sequence_parallel_size",
        "use_remove_padding": "model.use_remove_padding",
        "optim.lr_decay_style": "optim.lr_scheduler_type",
        "optim.lr_scheduler": "optim.lr_scheduler_type",
        "optim.warmup_style": "optim.lr_scheduler_type",
        "optim.warmup_steps_ratio": "optim.lr_warmup_steps_ratio",
        "engine.model_dtype": "engine.fsdp_config.model_dtype",
        "engine.dtype": "engine.fsdp_config.dtype",
        "engine.mixed_precision.*": "engine.fsdp_config.mixed_precision.*",
        "engine.override_transformer_config.*": f"{_TRANSFORMER}.*",
        "engine.sequence_parallel": "engine.megatron.sequence_parallel",
        "engine.use_distributed_optimizer": "engine.megatron.use_distributed_optimizer",
        "engine.ulysses_sequence_parallel_size": "engine.ulysses_sequence_parallel_size",
        "engine.*_parallel_size": "engine.megatron.*",
        "data.prompt_dict_keys": "data.prompt_field",
        "data.response_dict_keys": "data.response_field",
    },
)


def translate_verl_sft(values: dict[str, Any]) -> ForeignTranslation:
    """Translate the settings of verl's trainer of conversations, by dotted keys."""
    translation = ForeignTranslation(VERL_SFT, values, main="trainer")
    translation.set("algorithm", "sft")
    translation.copy_same()
    set_engine(translation, "engine")
    _set_rows(translation)
    set_template_arguments(translation)
    set_adapter(translation, "model.lora_rank", "model.lora_alpha", "", "model.target_modules")
    set_trackers(translation, "trainer.project_name", "trainer.experiment_name")
    set_schedule(translation, "optim")
    return translation


def _set_rows(translation: ForeignTranslation) -> None:
    max_rows, keys = translation.get("data.train_max_samples", -1), {}
    for name, ours in {"prompt": "prompt", "response": "answer"}.items():
        if fields := translation.get(f"data.{name}_field"):  # a key within the column
            keys[ours] = f"{translation.run.pop(f'data.{ours}_key', name)}.{list_values(fields)[0]}"
    for key, ours in {"data.train_files": "data.train", "data.val_files": "data.eval"}.items():
        if files := translation.get(key):
            more = {"keys": keys} if keys else {}
            more |= {"max_samples": max_rows} if ours == "data.train" and max_rows > 0 else {}
            translation.set(ours, [{"path": name_data(file), **more} for file in list_values(files)])
    policies = {"error": "error", "left": "truncate_left"}
    cut = translation.get("data.truncation")
    if cut in policies:
        translation.set("data.on_long", policies[cut])
    else:
        translation.refuse("data.truncation", "rows are cut on the left alone; those that are too long are dropped")
