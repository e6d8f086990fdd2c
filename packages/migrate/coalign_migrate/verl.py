"""verl: what several of its keys decide together."""

from __future__ import annotations

from typing import Any

from coalign_migrate.keys.foreign_keys import PLACED, TRAINER, VALUE
from coalign_migrate.keys.verl import MEGATRON, VERL
from coalign_migrate.translation import (
    ForeignTranslation,
    count_updates,
    set_adapter,
    set_policy_parallel,
    set_reference,
    set_trackers,
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
_KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_KL_ESTIMATORS |= {"k1+": "k1", "k2+": "k2", "k3+": "k3", "low_var_kl+": "k3"}
_DISTILLATION = "on_policy_distillation"
KL_IN_REWARD = ("ppo", "rloo", "reinforce_pp", "remax")
_CLIPPED = ("ppo", "grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "remax", "opo", "gspo", "gmpo", "clip_cov")
_CLIPPED += (_DISTILLATION,)


def translate_verl(program: str, values: dict[str, Any]) -> ForeignTranslation:
    """Translate the settings of `verl.trainer.main_ppo`, by dotted keys. ValueError for what has no recipe here."""
    if not program.endswith(_PROGRAMS):
        programs = ", ".join(_PROGRAMS)
        raise ValueError(f"verl's program {program} has no recipe here; sft_trainer has, and {programs}")
    translation = ForeignTranslation(VERL, values, main="policy")
    algorithm = _choose_algorithm(translation)
    translation.copy_same()
    if "one_step_off_policy" in program:
        translation.set("runtime.max_staleness", 1)
        translation.notes.append("runtime.max_staleness is 1: verl's program samples one step ahead")
    set_engine(translation, _ACTOR)
    _set_advantage(translation, algorithm)
    _set_loss(translation, algorithm)
    _set_kl(translation, algorithm)
    set_reference(translation)
    _set_teachers(translation, algorithm)
    _set_rewards(translation, algorithm)
    _set_sizes(translation)
    _set_value(translation, algorithm)
    _set_filter(translation)
    _set_evaluation(translation)
    set_template_arguments(translation)
    _set_adapter(translation)
    _refuse_episodes(translation)
    set_trackers(translation, "trainer.project_name", "trainer.experiment_name")
    set_schedule(translation, f"{_ACTOR}.optim")
    set_policy_parallel(translation)
    return translation


def _choose_algorithm(translation: ForeignTranslation) -> str:
    estimator = translation.get("algorithm.adv_estimator")
    mode = translation.get(f"{_ACTOR}.policy_loss.loss_mode", "vanilla")
    if estimator not in _ESTIMATORS:
        estimators = ", ".join(_ESTIMATORS)
        raise ValueError(f"algorithm.adv_estimator={estimator} has no recipe here; there are recipes for {estimators}")
    algorithm = _ESTIMATORS[estimator]
    if translation.get("distillation.enabled", False):
        algorithm = "on_policy_distillation"
    elif algorithm == "grpo" and mode in _LOSSES:
        algorithm = _LOSSES[mode]
    elif mode not in ("vanilla", algorithm):
        raise ValueError(
            f"{_ACTOR}.policy_loss.loss_mode={mode} with algorithm.adv_estimator={estimator} has no recipe here; "
            f"beside the advantage grpo there are {', '.join(_LOSSES)}"
        )
    translation.set("algorithm", algorithm)
    return algorithm


def set_engine(translation: ForeignTranslation, prefix: str) -> None:
    """Set the trainer's module and data types: verl multiplies in bfloat16 unless its file says otherwise."""
    strategy, megatron = translation.get(f"{prefix}.strategy", "fsdp"), f"{prefix}.megatron."
    modules = {"fsdp": "fsdp", "fsdp2": "fsdp", "dp": "fsdp", "megatron": "megatron"}
    module = modules.get(strategy, "fsdp")
    if strategy not in modules:
        translation.refuse(f"{prefix}.strategy", "trainers are fsdp, deepspeed and megatron; the run takes fsdp")
    translation.set(f"{TRAINER}.module", module)
    for theirs, ours in MEGATRON.items():
        value = translation.get(f"{megatron}{theirs}")
        if module == "megatron":
            translation.set(f"{TRAINER}.megatron.{ours}", value)
    if module == "megatron":
        granularity = translation.get(f"{megatron}override_transformer_config.recompute_granularity")
        translation.run.pop(f"{TRAINER}.activation_checkpointing", None)
        translation.set(f"{TRAINER}.activation_checkpointing", granularity)
    for name in ("aux", "z"):
        coef = translation.get(f"{megatron}override_transformer_config.moe_{name}_loss_coeff")
        translation.set(f"{TRAINER}.router_{name}_loss_coef", None if coef is None else float(coef))
    _set_dtypes(translation, prefix)


def _set_dtypes(translation: ForeignTranslation, prefix: str) -> None:
    names = ("fsdp_config.mixed_precision.param_dtype", "fsdp_config.dtype", "megatron.dtype")
    products = [translation.get(f"{prefix}.{name}") for name in names]
    single = any(value in ("fp32", "float32") for value in products)
    translation.set(f"models.{translation.main}.compute_dtype", "float32" if single else "bfloat16")
    for name, value in zip(names, products, strict=True):
        if value in ("fp16", "float16"):
            translation.refuse(f"{prefix}.{name}", "products are in bfloat16 or float32; the run takes bfloat16")
    stored = translation.get(f"{prefix}.fsdp_config.model_dtype", "fp32")
    translation.set(f"{TRAINER}.dtype", "bfloat16" if stored in ("bf16", "bfloat16") else None)


def set_schedule(translation: ForeignTranslation, prefix: str) -> None:
    """Set the warm-up, and the least rate where the schedule falls to one."""
    translation.convert_warmup(f"{prefix}.lr_warmup_steps_ratio")
    least, ratio = translation.get(f"{prefix}.min_lr"), f"{TRAINER}.optimizer.min_lr_ratio"
    if least and translation.run.get(f"{TRAINER}.optimizer.lr"):
        translation.set(ratio, round(float(least) / float(translation.run[f"{TRAINER}.optimizer.lr"]), 6))
    if translation.run.get(f"{TRAINER}.optimizer.schedule", "constant") == "constant":
        translation.run.pop(ratio, None)


def _set_advantage(translation: ForeignTranslation, algorithm: str) -> None:
    gamma, lam = float(translation.get("algorithm.gamma")), float(translation.get("algorithm.lam"))
    translation.set_discounts(algorithm, gamma, lam)
    scaled = translation.get("algorithm.norm_adv_by_std_in_grpo", True)
    if not scaled and algorithm not in ("ppo", "rloo", "remax", "opo", "gpg", "reinforce_pp", _DISTILLATION):
        translation.set("advantage.scale", "none")


def _set_loss(translation: ForeignTranslation, algorithm: str) -> None:
    clip = translation.get(f"{_ACTOR}.clip_ratio")
    low, high = (translation.get(f"{_ACTOR}.clip_ratio_{end}", clip) for end in ("low", "high"))
    given = translation.has(*(f"{_ACTOR}.clip_ratio{end}" for end in ("", "_low", "_high")))
    if algorithm in _CLIPPED and (given or algorithm not in ("gspo", "gmpo")):
        translation.set("loss.clip_low", float(low))
        translation.set("loss.clip_high", float(high))
    elif given:
        for end in ("", "_low", "_high"):
            translation.refuse(f"{_ACTOR}.clip_ratio{end}", f"the loss of `{algorithm}` has another clip")
    dual = translation.get(f"{_ACTOR}.clip_ratio_c")
    if algorithm in _CLIPPED and algorithm not in ("gspo", "gmpo"):
        translation.set("loss.dual_clip", float(dual))
    for name in ("tau_pos", "tau_neg"):
        value = translation.get(f"{_ACTOR}.{name}")
        if algorithm == "sapo" and value is not None:
            translation.set(f"loss.{name}", float(value))
    entropy = float(translation.get(f"{_ACTOR}.entropy_coeff", 0.0))
    if entropy:
        translation.set("loss.entropy_coef", entropy)
    _set_aggregation(translation, algorithm)
    _set_correction(translation)


def _set_aggregation(translation: ForeignTranslation, algorithm: str) -> None:
    """Set the aggregation. GSPO and GMPO have their own, as in verl, whatever `loss_agg_mode` says by default."""
    mode = translation.get(f"{_ACTOR}.loss_agg_mode", "token-mean")
    length = translation.get(f"{_ACTOR}.loss_scale_factor")
    if mode not in _AGGREGATIONS or (algorithm in ("gspo", "gmpo") and mode == "token-mean"):
        return translation.refuse(f"{_ACTOR}.loss_agg_mode", f"`{algorithm}` has no such mean; its own is kept")
    translation.set("loss.aggregation", _AGGREGATIONS[mode])
    if mode == "seq-mean-token-sum-norm":
        translation.set("loss.constant_length", length or translation.get("data.max_response_length"))


def _set_correction(translation: ForeignTranslation) -> None:
    key = "algorithm.rollout_correction.rollout_is"
    level, threshold = translation.get(key), translation.get(f"{key}_threshold", 2.0)
    if level is None:
        return
    translation.set("loss.is_level", {"token": "token", "sequence": "product"}.get(level, level))
    low, separated, high = str(threshold).partition("_")
    if separated:
        translation.set("loss.is_mode", "mask")
        translation.set("loss.is_low", float(low))
    translation.set("loss.is_high", float(high or low))


def _set_kl(translation: ForeignTranslation, algorithm: str) -> None:
    in_reward = bool(translation.get("algorithm.use_kl_in_reward", False))
    in_loss = bool(translation.get(f"{_ACTOR}.use_kl_loss", False))
    coef = float(translation.get("algorithm.kl_ctrl.kl_coef", 0.001))
    loss_coef = float(translation.get(f"{_ACTOR}.kl_loss_coef", 0.001))
    loss_estimator = translation.get(f"{_ACTOR}.kl_loss_type", "low_var_kl")
    adaptive = translation.get("algorithm.kl_ctrl.type", "fixed") == "adaptive"
    for name in ("target_kl", "horizon"):
        key = f"algorithm.kl_ctrl.{name}"
        translation.get(key)
        if adaptive and in_reward:
            translation.refuse(key, "verl's target is nats per token, Coalign's `kl.target` nats per response")
    penalty = translation.get("algorithm.kl_penalty", "kl")
    if in_reward and penalty not in ("kl", "k1"):
        translation.refuse("algorithm.kl_penalty", "the divergence in the reward is k1")
    if algorithm in KL_IN_REWARD:
        translation.set("kl.coef", coef if in_reward else 0.0)
        if adaptive and in_reward:
            translation.refuse("algorithm.kl_ctrl.type", "the coefficient is fixed; see `kl: {fn: AdaptiveKL}`")
        if in_loss:
            translation.refuse(f"{_ACTOR}.use_kl_loss", f"`{algorithm}` charges the divergence in the reward (`kl`)")
        return
    if in_reward:
        translation.refuse("algorithm.use_kl_in_reward", f"`{algorithm}` charges the divergence in the loss")
    translation.set("loss.kl_coef", loss_coef if in_loss else 0.0)
    if in_loss and loss_estimator in _KL_ESTIMATORS:
        translation.set("loss.kl_estimator", _KL_ESTIMATORS[loss_estimator])
    elif in_loss:
        translation.refuse(f"{_ACTOR}.kl_loss_type", "estimators are k1, k2 and k3; the recipe's own is kept")


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
        if number == 0:
            translation.set(f"models.{model}.dtype", "bfloat16")
        else:
            translation.set(f"models.{model}.like", "teacher")
        if row and len(set(names)) > 1:
            translation.notes.append(f"models.{model} is for rows whose key `teacher` says so (verl: {row})")
    translation.skip(f"{prefix}.teacher_models.*.inference.*", "a teacher is scored by the module fsdp")
    translation.skip(f"{prefix}.*n*", PLACED)
    _set_distance(translation, f"{prefix}.distillation_loss")


def _set_distance(translation: ForeignTranslation, prefix: str) -> None:
    mode, top = translation.get(f"{prefix}.loss_mode", "k3"), translation.get(f"{prefix}.topk", 32)
    if mode == "forward_kl_topk":
        translation.run = {key: value for key, value in translation.run.items() if not key.startswith("loss.")}
        translation.set("loss.fn", "distillation")
        translation.set("models.teacher.candidates", top)
        translation.set("loss.divergence", "forward")
    elif mode != "k1" or not translation.get(f"{prefix}.use_policy_gradient", False):
        translation.refuse(f"{prefix}.loss_mode", "the teacher's log-prob less the student's is the advantage (k1)")
    translation.get(f"{prefix}.use_policy_gradient")


def _set_rewards(translation: ForeignTranslation, algorithm: str) -> None:
    """Set rewards, and read the truth from where verl's rows have it."""
    path, name = (
        translation.get_text("custom_reward_function.path"),
        translation.get_text("custom_reward_function.name"),
    )
    model_path, rewards = translation.get("reward_model.model.path"), []
    if path or "custom_reward_function.path" in translation.unknown:
        name = f"{path or translation.unknown['custom_reward_function.path']}:{name or 'compute_score'}"
        rewards.append({"fn": f"<a function that calls {name}>"})
        translation.notes.append(
            f'reward: {name} has verl\'s signature; wrap it as docs/writing_a_reward.md, "From another library", shows'
        )
    if translation.get("reward_model.enable", False) and model_path:
        translation.set("models.reward", {"module": "fsdp", "load": str(model_path), "head": "reward", "frozen": True})
        rewards.append({"model": "reward"})
    if not rewards and algorithm != _DISTILLATION:
        rewards.append({"fn": "math"})
        translation.notes.append("reward: verl chooses a function by `data_source`; `math` is that of gsm8k and MATH")
    prefix = "reward_model.overlong_buffer"
    length, factor = translation.get(f"{prefix}.len"), translation.get(f"{prefix}.penalty_factor", 1.0)
    if translation.get(f"{prefix}.enable", False) and length:
        limit = translation.get("data.max_response_length")
        rewards.append({"fn": "length_penalty", "weight": float(factor), "max_tokens": limit, "buffer": length})
    translation.set("reward", rewards or None)
    manager = translation.get("reward_model.reward_manager", "naive")
    if manager not in ("naive", "dapo", "batch", "prime", "rate_limited"):
        translation.notes.append(
            f"reward: verl's manager is {manager}; here the parts of `reward` are summed by weight"
        )
    _set_rows(translation)


def _set_rows(translation: ForeignTranslation) -> None:
    """Set what is read of verl's rows: the truth, images, and how many."""
    max_rows, images = translation.get("data.train_max_samples", -1), translation.get_text("data.image_key")
    keys = {"answer": "reward_model.ground_truth"} | ({"images": images} if images not in (None, "images") else {})
    for key in ("data.train", "data.eval"):
        limit = {"max_samples": max_rows} if key == "data.train" and max_rows > 0 else {}
        if files := translation.run.get(key):
            files = [files] if isinstance(files, str) else files
            translation.run[key] = [{"path": file, "keys": keys, **limit} for file in files]
    if images and not translation.has("data.audio_key"):  # which a composed file has, like all keys
        translation.set("data.images", {})
    elif images:
        translation.notes.append("data.images: set it where rows have images; verl reads them where the model does")
    if translation.get(f"{_ACTOR}.freeze_vision_tower", False):
        translation.set(f"{TRAINER}.vision.tower", "freeze")
    if str(translation.get(f"{_ACTOR}.router_replay.mode", "disabled")).upper() == "R3":
        translation.set("rollout.routing_replay", True)


def _refuse_episodes(translation: ForeignTranslation) -> None:
    """List the settings of turns, tools and agents, which are environments here."""
    reason = "turns and tools are an environment here (`rollout`, docs/environments.md)"
    agent = translation.given.get(f"{_ROLLOUT}.agent.default_agent_loop", "single_turn_agent")
    if not translation.given.get(f"{_ROLLOUT}.multi_turn.enable") and agent == "single_turn_agent":
        translation.skip(f"{_ROLLOUT}.multi_turn.*", "the run has one turn")
        return translation.skip(f"{_ROLLOUT}.agent.*", "the run has one turn")
    for key in list(translation.given):
        if key.startswith((f"{_ROLLOUT}.multi_turn.", f"{_ROLLOUT}.agent.")) and not VERL.find_reason(key):
            translation.refuse(key, reason)
    if translation.given.get(f"{_ROLLOUT}.multi_turn.enable"):
        translation.notes.append(f"rollout: verl's episodes have several turns; {reason}")


def _set_adapter(translation: ForeignTranslation) -> None:
    set_adapter(translation, f"{_MODEL}.lora_rank", f"{_MODEL}.lora_alpha", "", f"{_MODEL}.target_modules")
    adapter = translation.get_text(f"{_MODEL}.lora_adapter_path")
    if adapter and f"{TRAINER}.lora.rank" in translation.run:
        translation.set(f"{TRAINER}.lora.load", adapter)


def _set_sizes(translation: ForeignTranslation) -> None:
    batch, update = translation.get("data.train_batch_size"), translation.get(f"{_ACTOR}.ppo_mini_batch_size")
    update = min(batch, update)
    updates = count_updates(translation, batch, update, "ppo_mini_batch_size")
    translation.set(f"{TRAINER}.updates_per_batch", updates)
    drops, cut = translation.get("data.filter_overlong_prompts"), translation.get("data.truncation")
    policies = {"error": "error", "left": "truncate_left"}
    if not drops and cut in policies:
        translation.set("data.on_long", policies[cut])
    elif not drops and cut:
        translation.refuse("data.truncation", "prompts are cut on the left alone; rows that are too long are dropped")


def _set_value(translation: ForeignTranslation, algorithm: str) -> None:
    """Set the value model, which is like the trainer where the file says nothing."""
    if algorithm != "ppo":
        reason = f"`{algorithm}` has no value model"
        translation.skip("critic.*", reason)
        return translation.skip("trainer.critic_warmup", reason)
    path = translation.get("critic.model.path")
    if path != translation.run.get("models.policy.load"):
        translation.set(f"{VALUE}.load", path)
    for name, ours in {"lr": "lr", "weight_decay": "weight_decay"}.items():
        value = translation.get(f"critic.optim.{name}")
        translation.set(f"{VALUE}.optimizer.{ours}", None if value is None else float(value))
    translation.set(f"{VALUE}.epochs_per_batch", translation.get("critic.ppo_epochs"))
    translation.set(f"{VALUE}.max_tokens_per_micro", translation.get("critic.ppo_max_token_len_per_gpu"))
    warmup = translation.get("critic.optim.lr_warmup_steps", -1)
    translation.set(f"{VALUE}.optimizer.warmup", warmup if warmup > 0 else None)
    if update := translation.get("critic.ppo_mini_batch_size"):
        batch = translation.get("data.train_batch_size")
        translation.set(f"{VALUE}.updates_per_batch", count_updates(translation, batch, update, "critic's"))
    translation.set(f"{VALUE}.loss.clip", float(translation.get("critic.cliprange_value")))
    translation.set(f"{TRAINER}.learns_after", translation.get("trainer.critic_warmup") or None)


def _set_filter(translation: ForeignTranslation) -> None:
    prefix = "algorithm.filter_groups"
    rounds = translation.get(f"{prefix}.max_num_gen_batches")
    translation.get(f"{prefix}.metric")
    if translation.get(f"{prefix}.enable", False):
        translation.set("filter.fn", "varied")
        translation.set("filter.max_rounds", rounds or None)


def _set_evaluation(translation: ForeignTranslation) -> None:
    prefix = f"{_ROLLOUT}.val_kwargs"
    temperature, draws = translation.get(f"{prefix}.temperature"), translation.get(f"{prefix}.do_sample", False)
    if draws and temperature:
        translation.set("runtime.eval_sampling.temperature", float(temperature))
    elif translation.run.get("runtime.eval_samples", 1) > 1:
        translation.refuse(f"{prefix}.n", "without val_kwargs.do_sample and a temperature all samples are the same")
        del translation.run["runtime.eval_samples"]


def set_template_arguments(translation: ForeignTranslation) -> None:
    """Set the arguments of the chat template, each of which is a key."""
    prefix = "data.apply_chat_template_kwargs."
    arguments = {key.removeprefix(prefix): translation.get(key) for key in translation.given if key.startswith(prefix)}
    translation.set("data.chat_template_kwargs", arguments or None)
