"""verl: what several of its keys decide together, in its trainers of policies and of conversations."""

from __future__ import annotations

from typing import Any

from coalign_migrate.keys.foreign_keys import PLACED, POLICY, TRAINER, VALUE, load_keys
from coalign_migrate.translation import (
    KL_IN_REWARD,
    ForeignTranslation,
    count_updates,
    list_values,
    look_up,
    set_adapter,
    set_divergence,
    set_least_rate,
    set_policy_parallel,
    set_reward_models,
    set_rows,
    set_trackers,
    set_vision,
    set_warmup,
    wrap_function,
)

_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_PROGRAMS = ("trainer.main_ppo", "trainer.main_ppo_sync", "one_step_off_policy.main_ppo", "dapo.main_dapo")
_ESTIMATORS = {
    "gae": "ppo",
    "grpo": "grpo",
    "rloo": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "remax": "remax",
    "opo": "opo",
    "gpg": "gpg",
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
}
_LOSSES = {"gspo": "gspo", "cispo": "cispo", "sapo": "sapo", "geo_mean": "gmpo", "clip_cov": "clip_cov"}
_LOSSES |= {"kl_cov": "kl_cov", "gpg": "gpg"}
_AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum-norm": "constant",
}
_MEGATRON = {  # under `models.trainer.megatron`
    "sequence_parallel": "sequence_parallel",
    "use_distributed_optimizer": "distributed_optimizer",
    "expert_tensor_parallel_size": "expert_tensor_parallel",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline",
    "override_transformer_config.num_layers_in_first_pipeline_stage": "first_stage_layers",
    "override_transformer_config.num_layers_in_last_pipeline_stage": "last_stage_layers",
    "override_transformer_config.recompute_granularity": "",  # the trainer's `activation_checkpointing`
}
_DISTILLATION = "on_policy_distillation"
_UNSCALED = ("ppo", "rloo", "remax", "opo", "gpg", "reinforce_pp", _DISTILLATION)  # by no deviation of a group


def translate_verl(program: str, values: dict[str, Any]) -> ForeignTranslation:
    """Translate the settings of `verl.trainer.main_ppo`, by dotted keys. ValueError for what has no recipe here."""
    if not program.endswith(_PROGRAMS):
        programs = ", ".join(_PROGRAMS)
        raise ValueError(f"verl's program {program} has no recipe here; sft_trainer has, and {programs}")
    translation = ForeignTranslation(load_keys("verl"), values, main="policy")
    algorithm = _choose_algorithm(translation)
    translation.set("algorithm", algorithm)
    translation.copy_same()
    translation.restrict(algorithm)
    if "one_step_off_policy" in program:
        translation.set("runtime.max_staleness", 1)
        translation.notes.append("runtime.max_staleness is 1: verl's program samples one step ahead")
    _set_common(translation)
    _set_loss(translation, algorithm)
    _set_kl(translation, algorithm)
    _set_teachers(translation, algorithm)
    _set_rewards(translation, algorithm)
    _set_sizes(translation)
    _set_value(translation, algorithm)
    _set_rollout(translation)
    _set_policy_rows(translation)
    adapter = translation.get_text(f"{_MODEL}.lora_adapter_path")
    if adapter and f"{TRAINER}.lora.rank" in translation.run:
        translation.set(f"{TRAINER}.lora.load", adapter)
    set_policy_parallel(translation)
    return translation


def translate_verl_sft(values: dict[str, Any]) -> ForeignTranslation:
    """Translate the settings of verl's trainer of conversations, by dotted keys."""
    translation = ForeignTranslation(load_keys("verl_sft"), values, main="trainer")
    translation.set("algorithm", "sft")
    translation.copy_same()
    translation.restrict("sft")
    keys = {}
    for name, ours in {"prompt": "prompt", "response": "answer"}.items():
        if fields := translation.get(f"data.{name}_field"):  # a key within the column
            keys[ours] = f"{translation.run.pop(f'data.{ours}_key', name)}.{list_values(fields)[0]}"
    _set_sources(translation, keys)
    _set_long_rows(translation, "rows are cut on the left alone; those that are too long are dropped")
    _set_common(translation)
    return translation


def _set_common(translation: ForeignTranslation) -> None:
    """Set what both trainers have: module, data types, template, adapter, trackers, schedule."""
    _set_module(translation)
    _set_dtypes(translation)
    prefix = "data.apply_chat_template_kwargs."
    arguments = {key.removeprefix(prefix): translation.get(key) for key in translation.given if key.startswith(prefix)}
    translation.set("data.chat_template_kwargs", arguments or None)
    set_adapter(translation, f"{_MODEL}.lora_rank", f"{_MODEL}.lora_alpha", "", f"{_MODEL}.target_modules")
    set_trackers(translation, "trainer.project_name", "trainer.experiment_name")
    set_warmup(translation, f"{_ACTOR}.optim.lr_warmup_steps_ratio")
    set_least_rate(translation, f"{_ACTOR}.optim.min_lr")


def _choose_algorithm(translation: ForeignTranslation) -> str:
    estimator = translation.get("algorithm.adv_estimator")
    mode = translation.get(f"{_ACTOR}.policy_loss.loss_mode", "vanilla")
    algorithm = look_up(_ESTIMATORS, estimator, f"algorithm.adv_estimator={estimator}")
    if translation.get("distillation.enabled", False):
        return _DISTILLATION
    if algorithm == "grpo" and mode in _LOSSES:
        return _LOSSES[mode]
    if mode not in ("vanilla", algorithm):
        raise ValueError(
            f"{_ACTOR}.policy_loss.loss_mode={mode} with algorithm.adv_estimator={estimator} has no recipe here; "
            f"beside the advantage grpo there are {', '.join(_LOSSES)}"
        )
    return algorithm


def _set_module(translation: ForeignTranslation) -> None:
    """Set the trainer's module, and what Megatron's alone has."""
    strategy, modules = translation.get(f"{_ACTOR}.strategy", "fsdp"), {"dp": "fsdp", "fsdp2": "fsdp"}
    module = modules.get(strategy, strategy)
    if module not in ("fsdp", "megatron"):
        translation.refuse(f"{_ACTOR}.strategy", "trainers are fsdp, deepspeed and megatron; the run takes fsdp")
        module = "fsdp"
    translation.set(f"{TRAINER}.module", module)
    values = {ours: translation.get(f"{_ACTOR}.megatron.{theirs}") for theirs, ours in _MEGATRON.items()}
    if module == "megatron":
        translation.drop(f"{TRAINER}.activation_checkpointing")
        for ours, value in values.items():
            translation.set(f"{TRAINER}.megatron.{ours}" if ours else f"{TRAINER}.activation_checkpointing", value)


def _set_dtypes(translation: ForeignTranslation) -> None:
    """Set data types: verl multiplies in bfloat16 unless its file says otherwise."""
    names = ("fsdp_config.mixed_precision.param_dtype", "fsdp_config.dtype", "megatron.dtype")
    products = {f"{_ACTOR}.{name}": translation.get(f"{_ACTOR}.{name}") for name in names}
    single = any(value in ("fp32", "float32") for value in products.values())
    translation.set(f"models.{translation.main}.compute_dtype", "float32" if single else "bfloat16")
    for key, value in products.items():
        if value in ("fp16", "float16"):
            translation.refuse(key, "products are in bfloat16 or float32; the run takes bfloat16")
    stored = translation.get(f"{_ACTOR}.fsdp_config.model_dtype", "fp32")
    translation.set(f"{TRAINER}.dtype", "bfloat16" if stored in ("bf16", "bfloat16") else None)


def _set_loss(translation: ForeignTranslation, algorithm: str) -> None:
    """Set the loss. GSPO and GMPO have their own clip and mean, as in verl, whatever it says of them by default."""
    by_sequence = algorithm in ("gspo", "gmpo")
    if by_sequence and not translation.has(*(f"{_ACTOR}.clip_ratio{end}" for end in ("", "_low", "_high"))):
        translation.drop("loss.clip_")
    if not translation.get("algorithm.norm_adv_by_std_in_grpo", True) and algorithm not in _UNSCALED:
        translation.set("advantage.scale", "none")
    mode = translation.get(f"{_ACTOR}.loss_agg_mode", "token-mean")
    length = translation.get(f"{_ACTOR}.loss_scale_factor")
    if mode not in _AGGREGATIONS or (by_sequence and mode == "token-mean"):
        translation.refuse(f"{_ACTOR}.loss_agg_mode", f"`{algorithm}` has no such mean; its own is kept")
    else:
        translation.set("loss.aggregation", _AGGREGATIONS[mode])
        if mode == "seq-mean-token-sum-norm":
            translation.set("loss.constant_length", length or translation.get("data.max_response_length"))
    key = "algorithm.rollout_correction.rollout_is"
    level, threshold = translation.get(key), translation.get(f"{key}_threshold", 2.0)
    if level is not None:
        translation.set("loss.is_level", {"sequence": "product"}.get(level, level))
        low, separated, high = str(threshold).partition("_")
        if separated:
            translation.set("loss.is_mode", "mask")
            translation.set("loss.is_low", float(low))
        translation.set("loss.is_high", float(high or low))


def _set_kl(translation: ForeignTranslation, algorithm: str) -> None:
    charged = bool(translation.get("algorithm.use_kl_in_reward", False))
    coef = translation.number("algorithm.kl_ctrl.kl_coef", 0.001)
    loss_coef = translation.number(f"{_ACTOR}.kl_loss_coef", 0.001)
    adaptive = translation.get("algorithm.kl_ctrl.type", "fixed") == "adaptive" and charged
    for name in ("target_kl", "horizon"):
        translation.get(f"algorithm.kl_ctrl.{name}")
        if adaptive:
            reason = "verl's target is nats per token, Coalign's `kl.target` nats per response"
            translation.refuse(f"algorithm.kl_ctrl.{name}", reason)
    if translation.get("algorithm.kl_penalty", "kl") not in ("kl", "k1") and charged:
        translation.refuse("algorithm.kl_penalty", "the divergence in the reward is k1")
    if adaptive and algorithm in KL_IN_REWARD:
        translation.refuse("algorithm.kl_ctrl.type", "the coefficient is fixed; see `kl: {fn: AdaptiveKL}`")
    set_divergence(
        translation,
        algorithm,
        in_reward=coef if charged else 0.0,
        in_loss=loss_coef if translation.get(f"{_ACTOR}.use_kl_loss", False) else 0.0,
        estimator=translation.get(f"{_ACTOR}.kl_loss_type", "low_var_kl"),
        keys=("algorithm.use_kl_in_reward", f"{_ACTOR}.use_kl_loss", f"{_ACTOR}.kl_loss_type"),
    )


def _set_teachers(translation: ForeignTranslation, algorithm: str) -> None:
    """Set the teachers of on-policy distillation. ValueError for one that also counts the reward of a task."""
    prefix = "distillation"
    if algorithm != _DISTILLATION:
        return translation.skip(f"{prefix}.*", "the run does not distil")
    if translation.get(f"{prefix}.distillation_loss.use_task_rewards", True):
        raise ValueError(f"{prefix}.distillation_loss.use_task_rewards=True: no recipe here adds rewards to a teacher")
    names = [key.split(".")[2] for key in translation.given if key.endswith(".model_path") and key.startswith(prefix)]
    for number, name in enumerate(dict.fromkeys(names)):
        path, row = (translation.get(f"{prefix}.teacher_models.{name}.{key}") for key in ("model_path", "key"))
        model = "teacher" if number == 0 else f"teacher_{name}"
        translation.set(f"models.{model}.load", path)
        setting, value = ("dtype", "bfloat16") if number == 0 else ("like", "teacher")
        translation.set(f"models.{model}.{setting}", value)
        if row and len(set(names)) > 1:
            translation.notes.append(f"models.{model} is for rows whose key `teacher` says so (verl: {row})")
    loss = f"{prefix}.distillation_loss"
    mode, candidates = translation.get(f"{loss}.loss_mode", "k3"), translation.get(f"{loss}.topk", 32)
    by_gradient = translation.get(f"{loss}.use_policy_gradient", False)
    translation.skip(f"{prefix}.teacher_models.*.inference.*", "a teacher is scored by the module fsdp")
    for name in ("n_gpus_per_node", "nnodes", "teacher_models.*.num_replicas", "num_workers"):
        translation.skip(f"{prefix}.{name}", PLACED)
    if mode == "forward_kl_topk":
        translation.drop("loss.")
        translation.set("loss.fn", "distillation")
        translation.set("models.teacher.candidates", candidates)
        translation.set("loss.divergence", "forward")
    elif mode != "k1" or not by_gradient:
        translation.refuse(f"{loss}.loss_mode", "the teacher's log-prob less the student's is the advantage (k1)")


def _set_rewards(translation: ForeignTranslation, algorithm: str) -> None:
    path_key, rewards = "custom_reward_function.path", []
    path, name = (translation.get_text(f"custom_reward_function.{key}") for key in ("path", "name"))
    if path := path or translation.unknown.get(path_key):
        rewards.append(wrap_function(translation, f"{path}:{name or 'compute_score'}"))
    model = translation.get("reward_model.model.path")
    if translation.get("reward_model.enable", False) and model:
        rewards += set_reward_models(translation, [model])
    if not rewards and algorithm != _DISTILLATION:
        rewards.append({"fn": "math"})
        translation.notes.append("reward: verl chooses a function by `data_source`; `math` is that of gsm8k and MATH")
    prefix = "reward_model.overlong_buffer"
    length, factor = translation.get(f"{prefix}.len"), translation.number(f"{prefix}.penalty_factor", 1.0)
    if translation.get(f"{prefix}.enable", False) and length:
        limit = translation.get("data.max_response_length")
        rewards.append({"fn": "length_penalty", "weight": factor, "max_tokens": limit, "buffer": length})
    translation.set("reward", rewards or None)
    manager = translation.get("reward_model.reward_manager", "naive")
    if manager not in ("naive", "dapo", "batch", "prime", "rate_limited"):
        translation.notes.append(f"reward: verl's manager is {manager}; here `reward` is summed by weight")


def _set_sources(translation: ForeignTranslation, keys: dict[str, str]) -> None:
    max_rows = translation.get("data.train_max_samples")
    for key, ours in {"data.train_files": "data.train", "data.val_files": "data.eval"}.items():
        set_rows(translation, ours, translation.get(key), keys=keys, max_rows=max_rows)


def _set_policy_rows(translation: ForeignTranslation) -> None:
    """Set what is read of verl's rows: the truth, and images."""
    images = translation.get_text("data.image_key")
    keys = {"answer": "reward_model.ground_truth"} | ({"images": images} if images not in (None, "images") else {})
    _set_sources(translation, keys)
    if images and not translation.has("data.audio_key"):  # which a composed file has, like all keys
        translation.set("data.images", {})
    elif images:
        translation.notes.append("data.images: set it where rows have images; verl reads them where the model does")
    set_vision(translation, f"{_ACTOR}.freeze_vision_tower")


def _set_long_rows(translation: ForeignTranslation, reason: str) -> None:
    policies, cut = {"error": "error", "left": "truncate_left"}, translation.get("data.truncation")
    if cut in policies:
        translation.set("data.on_long", policies[cut])
    else:
        translation.refuse("data.truncation", reason)


def _set_sizes(translation: ForeignTranslation) -> None:
    batch, update = translation.get("data.train_batch_size"), translation.get(f"{_ACTOR}.ppo_mini_batch_size")
    updates = count_updates(translation, batch, min(batch, update), "ppo_mini_batch_size")
    translation.set(f"{TRAINER}.updates_per_batch", updates)
    translation.get("data.truncation")
    if not translation.get("data.filter_overlong_prompts"):
        _set_long_rows(translation, "prompts are cut on the left alone; rows that are too long are dropped")


def _set_value(translation: ForeignTranslation, algorithm: str) -> None:
    """Set the value model, which is like the trainer where the file says nothing."""
    if algorithm != "ppo":
        return translation.skip("critic.*", f"`{algorithm}` has no value model")
    if translation.run.get(f"{VALUE}.load") == translation.run.get(f"{POLICY}.load"):
        translation.drop(f"{VALUE}.load")
    if update := translation.get("critic.ppo_mini_batch_size"):
        batch = translation.get("data.train_batch_size")
        translation.set(f"{VALUE}.updates_per_batch", count_updates(translation, batch, update, "critic's"))


def _set_rollout(translation: ForeignTranslation) -> None:
    """Set what samples: routes, filters, evaluation. Turns, tools and agents are environments here, and listed."""
    if str(translation.get(f"{_ACTOR}.router_replay.mode", "disabled")).upper() == "R3":
        translation.set("rollout.routing_replay", True)
    prefix = "algorithm.filter_groups"
    rounds = translation.get(f"{prefix}.max_num_gen_batches")
    translation.get(f"{prefix}.metric")
    if translation.get(f"{prefix}.enable", False):
        translation.set("filter.fn", "varied")
        translation.set("filter.max_rounds", rounds or None)
    prefix = f"{_ROLLOUT}.val_kwargs"
    temperature, draws = translation.number(f"{prefix}.temperature"), translation.get(f"{prefix}.do_sample", False)
    if draws and temperature:
        translation.set("runtime.eval_sampling.temperature", temperature)
    elif translation.run.get("runtime.eval_samples", 1) > 1:
        translation.refuse(f"{prefix}.n", "without val_kwargs.do_sample and a temperature all samples are the same")
        translation.drop("runtime.eval_samples")
    reason = "turns and tools are an environment here (`rollout`, docs/environments.md)"
    agent = translation.given.get(f"{_ROLLOUT}.agent.default_agent_loop", "single_turn_agent")
    has_turns = translation.given.get(f"{_ROLLOUT}.multi_turn.enable")
    if not has_turns and agent == "single_turn_agent":
        translation.skip(f"{_ROLLOUT}.multi_turn.*", "the run has one turn")
        return translation.skip(f"{_ROLLOUT}.agent.*", "the run has one turn")
    for key in list(translation.given):
        if key.startswith((f"{_ROLLOUT}.multi_turn.", f"{_ROLLOUT}.agent.")) and not translation.keys.find_reason(key):
            translation.refuse(key, reason)
    if has_turns:
        translation.notes.append(f"rollout: verl's episodes have several turns; {reason}")
