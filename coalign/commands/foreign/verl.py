"""verl: what several of its keys decide together."""

from __future__ import annotations

from typing import Any

from coalign.commands.foreign.translation import (
    ForeignTranslation,
    count_updates,
    set_adapter,
    set_policy_parallel,
    set_trackers,
)
from coalign.config.foreign_keys import TRAINER, VALUE, VERL

_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_ESTIMATORS = {
    "gae": "ppo",
    "grpo": "grpo",
    "rloo": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "remax": "remax",
    "opo": "opo",
    "gpg": "gpg",
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
KL_IN_REWARD = ("ppo", "rloo", "reinforce_pp", "remax")
_CLIPPED = ("ppo", "grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "remax", "opo", "gspo", "gmpo", "clip_cov")


def translate_verl(values: dict[str, Any]) -> ForeignTranslation:
    """Translate the settings of `verl.trainer.main_ppo`, by dotted keys."""
    translation = ForeignTranslation(VERL, values, main="policy")
    algorithm = _choose_algorithm(translation)
    translation.copy_same()
    _set_advantage(translation, algorithm)
    _set_loss(translation, algorithm)
    _set_kl(translation, algorithm)
    _set_rewards(translation)
    _set_sizes(translation)
    _set_value(translation, algorithm)
    _set_filter(translation)
    _set_evaluation(translation)
    set_adapter(translation, f"{_MODEL}.lora_rank", f"{_MODEL}.lora_alpha", "", f"{_MODEL}.target_modules")
    set_trackers(translation, "trainer.project_name", "trainer.experiment_name")
    translation.convert_warmup(f"{_ACTOR}.optim.lr_warmup_steps_ratio")
    set_policy_parallel(translation)
    return translation


def _choose_algorithm(translation: ForeignTranslation) -> str:
    estimator = translation.get("algorithm.adv_estimator")
    mode = translation.get(f"{_ACTOR}.policy_loss.loss_mode", "vanilla")
    algorithm = _ESTIMATORS.get(estimator, "grpo")
    if estimator not in _ESTIMATORS:
        translation.refuse("algorithm.adv_estimator", "no recipe here; the run is `grpo`, see docs/algorithms.md")
    if algorithm == "grpo" and mode in _LOSSES:
        algorithm = _LOSSES[mode]
    elif mode not in ("vanilla", algorithm):
        translation.refuse(f"{_ACTOR}.policy_loss.loss_mode", f"no such loss beside the advantage of `{algorithm}`")
    translation.set("algorithm", algorithm)
    return algorithm


def _set_advantage(translation: ForeignTranslation, algorithm: str) -> None:
    gamma, lam = float(translation.get("algorithm.gamma")), float(translation.get("algorithm.lam"))
    translation.set_discounts(algorithm, gamma, lam)
    if not translation.get("algorithm.norm_adv_by_std_in_grpo", True):
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
    """Set the aggregation. GSPO has one of its own, as in verl, whatever `loss_agg_mode` says by default."""
    mode = translation.get(f"{_ACTOR}.loss_agg_mode", "token-mean")
    length = translation.get(f"{_ACTOR}.loss_scale_factor")
    if mode not in _AGGREGATIONS or (algorithm == "gspo" and mode == "token-mean"):
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
    kind = translation.get(f"{_ACTOR}.kl_loss_type", "low_var_kl")
    adaptive = translation.get("algorithm.kl_ctrl.type", "fixed") == "adaptive"
    for name in ("target_kl", "horizon"):
        key = f"algorithm.kl_ctrl.{name}"
        translation.get(key)
        if adaptive and in_reward:
            translation.refuse(key, "verl's target is nats per token, Coalign's `kl.target` nats per response")
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
    if in_loss and kind in _KL_ESTIMATORS:
        translation.set("loss.kl_estimator", _KL_ESTIMATORS[kind])
    elif in_loss:
        translation.refuse(f"{_ACTOR}.kl_loss_type", "estimators are k1, k2 and k3; the recipe's own is kept")


def _set_rewards(translation: ForeignTranslation) -> None:
    """Set rewards, and read the truth from where verl's rows have it."""
    old, new = "custom_reward_function", "reward.custom_reward_function"
    path = translation.get(f"{old}.path") or translation.get(f"{new}.path")
    name = translation.get(f"{old}.name") or translation.get(f"{new}.name", "compute_score")
    model_path = translation.get("reward_model.model.path") or translation.get("reward.reward_model.model_path")
    uses_model = translation.get("reward_model.enable", False) or translation.get("reward.reward_model.enable", False)
    parts: list[dict[str, Any]] = []
    if path:
        parts.append({"fn": f"<a function that calls {path}:{name}>"})
        translation.notes.append(
            f"reward: {name} of {path} has verl's signature; wrap it as docs/writing_a_reward.md, \"From another "
            'library", shows'
        )
    if uses_model and model_path:
        translation.set("models.reward", {"module": "fsdp", "load": str(model_path), "head": "reward", "frozen": True})
        parts.append({"model": "reward"})
    if not parts:
        parts.append({"fn": "math"})
        translation.notes.append("reward: verl chooses a function by `data_source`; `math` is that of gsm8k and MATH")
    prefix = "reward_model.overlong_buffer"
    length, factor = translation.get(f"{prefix}.len"), translation.get(f"{prefix}.penalty_factor", 1.0)
    if translation.get(f"{prefix}.enable", False) and length:
        limit = translation.get("data.max_response_length")
        parts.append({"fn": "length_penalty", "weight": float(factor), "max_tokens": limit, "buffer": length})
    translation.set("reward", parts)
    for key in ("data.train", "data.eval"):
        if files := translation.run.get(key):
            translation.run[key] = [{"path": file, "keys": {"answer": "reward_model.ground_truth"}} for file in files]


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
        for key in [key for key in translation.given if key.startswith("critic.") or key == "trainer.critic_warmup"]:
            translation.refuse(key, f"`{algorithm}` has no value model")
        return
    path = translation.get("critic.model.path")
    if path != translation.run.get("models.policy.load"):
        translation.set(f"{VALUE}.load", path)
    for name, ours in {"lr": "lr", "weight_decay": "weight_decay"}.items():
        value = translation.get(f"critic.optim.{name}")
        translation.set(f"{VALUE}.optimizer.{ours}", None if value is None else float(value))
    translation.set(f"{VALUE}.epochs_per_batch", translation.get("critic.ppo_epochs"))
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
