"""slime: its flags and what they are called here, and what several of them decide together."""

from __future__ import annotations

from typing import Any

from coalign_migrate.keys.foreign_keys import KERNELS, MEMORY, MICRO, PLACED, POLICY, SAMPLING, TRAINER, ForeignKeys
from coalign_migrate.translation import (
    ForeignTranslation,
    count_updates,
    list_values,
    name_data,
    set_policy_parallel,
    set_reference,
)

_SHAPE = "config.json of the model says its shape"
_FLAGS_OF_SHAPE = ("*layers*", "*hidden_size*", "*heads", "*query_groups", "group_query_attention", "*rotary*")
_FLAGS_OF_SHAPE += ("*rope*", "vocab_size", "*vocab_size_divisible_by", "*layernorm*", "normalization", "norm_epsilon")
_FLAGS_OF_SHAPE += ("kv_channels", "swiglu", "*bias*", "untie_*", "*embedding*", "*lora_rank", "*head_dim", "*mscale*")
_FLAGS_OF_SHAPE += ("moe_router_*", "moe_layer_freq", "moe_shared_expert*", "num_experts", "*latent_attention", "spec")
_FLAGS_OF_SHAPE += ("*gated_attention", "*output_gate", "model_name", "seq_length", "*hidden_dropout", "mtp_*")
_KERNELS = ("*softmax*", "*fusion", "moe_grouped_gemm", "*deepep", "*dispatcher*", "*overlap*", "*nan*", "*backend")
_KERNELS += (
    "*precision_aware*",
    "*fp32",
    "*token_drop*",
    "transformer_impl",
    "enable_experimental",
    "*_impl",
    "log_probs_*",
)
_ESTIMATORS = {
    "grpo": "grpo",
    "gspo": "gspo",
    "cispo": "cispo",
    "ppo": "ppo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}
_REWARDS = {"math": "math", "deepscaler": "math", "dapo": "math", "f1": "f1"}

SLIME = ForeignKeys(
    "slime",
    inputs=("`--hf-checkpoint`", "`--prompt-data`"),
    same={
        "seed": "seed",
        "save": "output",
        "rollout_batch_size": "runtime.prompts_per_step",
        "n_samples_per_prompt": "runtime.samples_per_prompt",
        "num_rollout": "runtime.steps",
        "num_epoch": "runtime.epochs",
        "save_interval": "runtime.save_every",
        "eval_interval": "runtime.eval_every",
        "n_samples_per_eval_prompt": "runtime.eval_samples",
        "eval_max_response_len": "runtime.eval_sampling.max_new_tokens",
        "eval_temperature": "runtime.eval_sampling.temperature",
        "eval_top_p": "runtime.eval_sampling.top_p",
        "eval_top_k": "runtime.eval_sampling.top_k",
        "rollout_shuffle": "data.shuffle",
        "rollout_max_prompt_len": "data.max_prompt_tokens",
        "rollout_max_response_len": f"{SAMPLING}.max_new_tokens",
        "rollout_temperature": f"{SAMPLING}.temperature",
        "rollout_top_p": f"{SAMPLING}.top_p",
        "rollout_top_k": f"{SAMPLING}.top_k",
        "rollout_stop": f"{SAMPLING}.stop",
        "apply_chat_template_kwargs": "data.chat_template_kwargs",
        "tool_key": "data.tools_key",
        "hf_checkpoint": "models.NAME.load",
        "lr": f"{TRAINER}.optimizer.lr",
        "weight_decay": f"{TRAINER}.optimizer.weight_decay",
        "clip_grad": f"{TRAINER}.optimizer.clip_grad_norm",
        "lr_decay_style": f"{TRAINER}.optimizer.schedule",
        "lr_warmup_iters": f"{TRAINER}.optimizer.warmup",
        "max_tokens_per_gpu": f"{TRAINER}.max_tokens_per_micro",
        "recompute_granularity": f"{TRAINER}.activation_checkpointing",
        "tensor_model_parallel_size": f"{TRAINER}.tensor_parallel",
        "pipeline_model_parallel_size": f"{TRAINER}.pipeline_parallel",
        "context_parallel_size": f"{TRAINER}.context_parallel",
        "expert_model_parallel_size": f"{TRAINER}.expert_parallel",
        "expert_tensor_parallel_size": f"{TRAINER}.megatron.expert_tensor_parallel",
        "sequence_parallel": f"{TRAINER}.megatron.sequence_parallel",
        "decoder_first_pipeline_num_layers": f"{TRAINER}.megatron.first_stage_layers",
        "decoder_last_pipeline_num_layers": f"{TRAINER}.megatron.last_stage_layers",
        "moe_aux_loss_coeff": f"{TRAINER}.router_aux_loss_coef",
        "rollout_num_gpus_per_engine": f"{POLICY}.tensor_parallel",
        "use_rollout_routing_replay": "rollout.routing_replay",
    },
    combined={
        "prompt_data": "data.train",
        "eval_prompt_data": "data.eval",
        "input_key": "data.prompt_key",
        "label_key": "data.train[].keys",
        "apply_chat_template": "data.chat_template",
        "advantage_estimator": "algorithm and advantage.fn",
        "loss_type": "algorithm",
        "global_batch_size": f"{TRAINER}.updates_per_batch (how many of them a batch makes)",
        "num_steps_per_rollout": f"{TRAINER}.updates_per_batch",
        "use_kl_loss": "loss.kl_coef",
        "kl_loss_coef": "loss.kl_coef",
        "kl_loss_type": "loss.kl_estimator",
        "kl_coef": "kl.coef",
        "eps_clip": "loss.clip_low and loss.clip_high",
        "eps_clip_high": "loss.clip_high",
        "eps_clip_c": "loss.dual_clip",
        "value_clip": "models.value.loss.clip",
        "critic_lr": "models.value.optimizer.lr",
        "critic_load": "models.value.load",
        "num_critic_only_steps": f"{TRAINER}.learns_after",
        "entropy_coef": "loss.entropy_coef",
        "gamma": "advantage.gamma",
        "lambd": "advantage.lam",
        "disable_grpo_std_normalization": "advantage.scale",
        "calculate_per_token_loss": "loss.aggregation",
        "use_tis": "loss.is_level",
        "tis_clip": "loss.is_high",
        "tis_clip_low": "loss.is_low",
        "adam_beta1": f"{TRAINER}.optimizer.betas",
        "adam_beta2": f"{TRAINER}.optimizer.betas",
        "min_lr": f"{TRAINER}.optimizer.min_lr_ratio",
        "lr_warmup_fraction": f"{TRAINER}.optimizer.warmup (in steps)",
        "optimizer": f"{TRAINER}.optimizer.name",
        "rm_type": "reward.fn",
        "custom_rm_path": "reward.fn (my.module:function)",
        "rm_url": "reward: [{fn: remote, url}]",
        "dynamic_sampling_filter_path": "filter",
        "use_wandb": "runtime.trackers",
        "wandb_project": "runtime.trackers[].project",
        "wandb_group": "runtime.trackers[].run",
        "use_tensorboard": "runtime.trackers",
    },
    unneeded={
        "load": "the same command goes on from the newest checkpoint",
        "ref_load": "the reference is like the trainer; Megatron's copies of hf_checkpoint are not needed",
        "micro_batch_size": MICRO,
        "use_dynamic_batch_size": MICRO,
        "data_pad_size_multiplier": MICRO,
        "balance_*": "batches are always balanced by tokens",
        "actor_num_*": PLACED,
        "rollout_num_gpus": PLACED,
        "num_gpus_per_node": PLACED,
        "colocate": PLACED,
        "offload*": MEMORY,
        "optimizer_cpu_offload": MEMORY,
        "sglang_*": "the engine takes what its own settings say (models.policy.native)",
        "update_weight*": "weights come by the weight sync",
        "use_distributed_optimizer": "models.trainer.megatron.distributed_optimizer is the default",
        "recompute_*": "models.trainer.activation_checkpointing recomputes whole layers",
        "wandb_*": "trackers read their own variables",
        "rollout_seed": "seed is for all draws",
        "attention_dropout": "policies are trained without dropout",
        **dict.fromkeys(_FLAGS_OF_SHAPE, _SHAPE),
        **dict.fromkeys(_KERNELS, KERNELS),
    },
    defaults={
        "n_samples_per_prompt": 1,
        "advantage_estimator": "grpo",
        "kl_loss_type": "k1",
        "eps_clip": 0.2,
        "value_clip": 0.2,
        "rollout_temperature": 1.0,
        "rollout_shuffle": False,
        "input_key": "input",
        "weight_decay": 0.01,  # Megatron's own
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "lr_decay_style": "linear",
    },
)


def translate_slime(values: dict[str, Any]) -> ForeignTranslation:
    """Translate the flags of slime's `train.py` and `train_async.py`. ValueError for a loss that has no recipe here."""
    loss_type = values.get("loss_type", "policy_loss")
    if loss_type not in ("policy_loss", "sft_loss"):
        raise ValueError(f"slime's --loss-type {loss_type} has no recipe here; policy_loss and sft_loss have")
    translation = ForeignTranslation(SLIME, values, main="trainer" if loss_type == "sft_loss" else "policy")
    translation.get("loss_type")
    translation.copy_same()
    translation.set(f"{TRAINER}.module", "megatron")
    translation.set(f"models.{translation.main}.compute_dtype", "bfloat16")
    _set_optimizer(translation)
    _set_trackers(translation)
    if loss_type == "sft_loss":
        _set_conversations(translation)
        return translation
    algorithm = _choose_algorithm(translation)
    _set_rows(translation)
    _set_loss(translation, algorithm)
    _set_updates(translation)
    _set_rewards(translation)
    set_policy_parallel(translation)
    return translation


def _choose_algorithm(translation: ForeignTranslation) -> str:
    estimator = translation.get("advantage_estimator")
    if estimator not in _ESTIMATORS:
        names = ", ".join(_ESTIMATORS)
        raise ValueError(f"slime's --advantage-estimator {estimator} has no recipe here; there are recipes for {names}")
    if translation.given.get("use_opd"):
        raise ValueError(
            "slime's --use-opd has no recipe here; `on_policy_distillation` has no reward beside a teacher"
        )
    translation.set("algorithm", _ESTIMATORS[estimator])
    return _ESTIMATORS[estimator]


def _set_optimizer(translation: ForeignTranslation) -> None:
    betas = [float(translation.get(f"adam_beta{number}")) for number in (1, 2)]
    translation.set(f"{TRAINER}.optimizer.betas", betas)
    if translation.get("optimizer", "adam") not in ("adam", "adamw"):
        translation.refuse("optimizer", "see models.trainer.optimizer.name; the run takes adamw")
    translation.convert_warmup("lr_warmup_fraction")
    least, lr = translation.get("min_lr"), translation.run.get(f"{TRAINER}.optimizer.lr")
    if least and lr and translation.run.get(f"{TRAINER}.optimizer.schedule", "constant") != "constant":
        translation.set(f"{TRAINER}.optimizer.min_lr_ratio", round(float(least) / float(lr), 6))


def _set_trackers(translation: ForeignTranslation) -> None:
    names = {"project": translation.get_text("wandb_project"), "run": translation.get_text("wandb_group")}
    names = {name: value for name, value in names.items() if value}
    trackers: list[Any] = [{"name": "wandb", **names}] if translation.get("use_wandb", False) else []
    trackers += ["tensorboard"] if translation.get("use_tensorboard", False) else []
    translation.set("runtime.trackers", trackers or None)
    translation.hide("wandb_key")


def _set_rows(translation: ForeignTranslation) -> None:
    translation.set("data.prompt_key", translation.get("input_key"))
    label = translation.get("label_key")
    keys = {"keys": {"answer": label}} if label else {}
    if path := translation.get("prompt_data"):
        translation.set("data.train", [{"path": name_data(path), **keys}])
    for key in ("temperature", "top_p", "top_k"):  # where nothing is said, evaluation draws as training does
        if (value := translation.run.get(f"{SAMPLING}.{key}")) is not None:
            translation.run.setdefault(f"runtime.eval_sampling.{key}", value)
    named = translation.get("eval_prompt_data")
    if named:  # pairs of a name and a path
        files = list_values(named)
        files = files[1::2] if isinstance(named, list) else files
        translation.set("data.eval", [{"path": name_data(file), **keys} for file in files])
    if not translation.get("apply_chat_template", False):
        translation.set("data.chat_template", "none")


def _set_conversations(translation: ForeignTranslation) -> None:
    """Set a run of SFT: the key of the prompt is then that of the messages."""
    translation.set("algorithm", "sft")
    translation.set("data.messages_key", translation.get("input_key"))
    if path := translation.get("prompt_data"):
        translation.set("data.train", [{"path": name_data(path)}])
    translation.skip("advantage_estimator", "conversations are learned as they are")
    translation.skip("disable_compute_advantages_and_returns", "conversations are learned as they are")
    translation.skip("debug_train_only", "conversations are learned as they are")
    translation.skip("rollout_function_path", "conversations are learned as they are")
    translation.skip("n_samples_per_prompt", "conversations are learned as they are")
    translation.skip("global_batch_size", "runtime.prompts_per_step")
    translation.skip("calculate_per_token_loss", "the loss is the mean of all tokens")
    for key in [key for key in translation.run if "samples_per_prompt" in key or key.startswith(POLICY)]:
        del translation.run[key]
    translation.set("runtime.prompts_per_step", translation.get("global_batch_size"))


def _set_loss(translation: ForeignTranslation, algorithm: str) -> None:
    low = float(translation.get("eps_clip"))
    high = float(translation.get("eps_clip_high", low))
    translation.set("loss.clip_high", high)
    if algorithm != "cispo":
        translation.set("loss.clip_low", low)
    dual, entropy = translation.get("eps_clip_c"), float(translation.get("entropy_coef", 0.0))
    if algorithm not in ("gspo", "cispo"):
        translation.set("loss.dual_clip", None if dual is None else float(dual))
    translation.set("loss.entropy_coef", entropy or None)
    per_token = bool(translation.get("calculate_per_token_loss", False))
    translation.set("loss.aggregation", "token_mean" if per_token else "sequence_mean_token_mean")
    translation.set_discounts(algorithm, float(translation.get("gamma", 1.0)), float(translation.get("lambd", 1.0)))
    if translation.get("disable_grpo_std_normalization", False) and algorithm in ("grpo", "gspo", "cispo"):
        translation.set("advantage.scale", "none")
    _set_kl(translation, algorithm)
    high, low = translation.get("tis_clip", 2.0), translation.get("tis_clip_low", 0)
    if translation.get("use_tis", False):
        translation.set("loss.is_level", "token")
        translation.set("loss.is_high", float(high))
        translation.set("loss.is_low", float(low) or None)
    for key, ours in {"value_clip": "loss.clip", "critic_lr": "optimizer.lr"}.items():
        if (value := translation.get(key)) is not None and algorithm == "ppo":
            translation.set(f"models.value.{ours}", float(value))
    if algorithm == "ppo":
        translation.set("models.value.load", translation.get("critic_load"))
        translation.set(f"{TRAINER}.learns_after", translation.get("num_critic_only_steps") or None)


def _set_kl(translation: ForeignTranslation, algorithm: str) -> None:
    in_loss = bool(translation.get("use_kl_loss", False))
    coef, charged = float(translation.get("kl_loss_coef", 0.0)), float(translation.get("kl_coef", 0.0))
    estimator = translation.get("kl_loss_type")
    if algorithm in ("ppo", "reinforce_pp"):
        translation.set("kl.coef", charged)
        if in_loss and coef:
            translation.refuse("use_kl_loss", f"`{algorithm}` charges the divergence in the reward (`kl`)")
    else:
        translation.set("loss.kl_coef", coef if in_loss else 0.0)
        if in_loss and coef:
            translation.set("loss.kl_estimator", {"low_var_kl": "k3"}.get(estimator, estimator))
        if charged:
            translation.refuse("kl_coef", f"`{algorithm}` charges the divergence in the loss")
    set_reference(translation)


def _set_updates(translation: ForeignTranslation) -> None:
    samples = translation.run["runtime.prompts_per_step"] * translation.run["runtime.samples_per_prompt"]
    steps, update = translation.get("num_steps_per_rollout"), translation.get("global_batch_size")
    if steps or update:
        count = steps or count_updates(translation, samples, update, "global-batch-size (of samples)")
        translation.set(f"{TRAINER}.updates_per_batch", count)


def _set_rewards(translation: ForeignTranslation) -> None:
    path, rm_type, url = (translation.get_text(name) for name in ("custom_rm_path", "rm_type", "rm_url"))
    if path:
        translation.set("reward", [{"fn": f"<a function that calls {path}>"}])
        translation.notes.append(f"reward: {path} has slime's signature; docs/writing_a_reward.md shows how to wrap it")
    elif rm_type == "remote_rm" and url:
        translation.set("reward", [{"fn": "remote", "url": url}])
    elif rm_type in _REWARDS:
        translation.set("reward", [{"fn": _REWARDS[rm_type]}])
    else:
        translation.set("reward", [{"fn": f"<a function that does what slime's rm_type {rm_type} does>"}])
    for name in ("custom_generate_function_path", "rollout_function_path"):
        translation.refuse(name, "rollouts of your own are an environment here (`rollout`, docs/environments.md)")
    if translation.get("dynamic_sampling_filter_path"):
        translation.set("filter.fn", "varied")
