"""slime: what several of its flags decide together."""

from __future__ import annotations

from typing import Any

from coalign_migrate.keys.foreign_keys import POLICY, SAMPLING, TRAINER, load_keys
from coalign_migrate.translation import (
    ForeignTranslation,
    count_updates,
    look_up,
    set_divergence,
    set_least_rate,
    set_policy_parallel,
    set_rows,
    set_trackers,
    set_warmup,
    wrap_function,
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
_FLAGS_OF_SAMPLES = ("advantage_estimator", "disable_compute_advantages_and_returns", "debug_train_only")
_FLAGS_OF_SAMPLES += ("rollout_function_path", "n_samples_per_prompt")


def translate_slime(values: dict[str, Any]) -> ForeignTranslation:
    """Translate the flags of slime's `train.py` and `train_async.py`. ValueError for a loss that has no recipe here."""
    loss_type = values.get("loss_type", "policy_loss")
    if loss_type not in ("policy_loss", "sft_loss"):
        raise ValueError(f"slime's --loss-type {loss_type} has no recipe here; policy_loss and sft_loss have")
    translation = ForeignTranslation(
        load_keys("slime"), values, main="trainer" if loss_type == "sft_loss" else "policy"
    )
    translation.get("loss_type")
    translation.copy_same()
    translation.set(f"{TRAINER}.module", "megatron")
    translation.set(f"models.{translation.main}.compute_dtype", "bfloat16")
    translation.set(f"{TRAINER}.optimizer.betas", [translation.number(f"adam_beta{number}") for number in (1, 2)])
    if translation.get("optimizer", "adam") not in ("adam", "adamw"):
        translation.refuse("optimizer", "see models.trainer.optimizer.name; the run takes adamw")
    set_warmup(translation, "lr_warmup_fraction")
    set_least_rate(translation, "min_lr")
    set_trackers(translation, "wandb_project", "wandb_group", {"wandb": "use_wandb", "tensorboard": "use_tensorboard"})
    translation.hide("wandb_key")
    if loss_type == "sft_loss":
        _set_conversations(translation)
        return translation
    estimator = translation.get("advantage_estimator")
    algorithm = look_up(_ESTIMATORS, estimator, f"slime's --advantage-estimator {estimator}")
    if translation.given.get("use_opd"):
        raise ValueError(
            "slime's --use-opd has no recipe here; `on_policy_distillation` has no reward beside a teacher"
        )
    translation.set("algorithm", algorithm)
    translation.restrict(algorithm)
    _set_rows(translation)
    _set_loss(translation, algorithm)
    samples = translation.run["runtime.prompts_per_step"] * translation.run["runtime.samples_per_prompt"]
    steps, update = translation.get("num_steps_per_rollout"), translation.get("global_batch_size")
    if steps or update:
        count = steps or count_updates(translation, samples, update, "global-batch-size (of samples)")
        translation.set(f"{TRAINER}.updates_per_batch", count)
    _set_rewards(translation)
    set_policy_parallel(translation)
    return translation


def _set_rows(translation: ForeignTranslation) -> None:
    translation.set("data.prompt_key", translation.get("input_key"))
    label = translation.get("label_key")
    keys = {"answer": label} if label else {}
    set_rows(translation, "data.train", translation.get("prompt_data"), keys=keys)
    named = translation.get("eval_prompt_data") or []  # pairs of a name and a path
    set_rows(translation, "data.eval", named[1::2] if isinstance(named, list) else named, keys=keys)
    for key in ("temperature", "top_p", "top_k"):  # where nothing is said, evaluation draws as training does
        if (value := translation.run.get(f"{SAMPLING}.{key}")) is not None:
            translation.run.setdefault(f"runtime.eval_sampling.{key}", value)
    if not translation.get("apply_chat_template", False):
        translation.set("data.chat_template", "none")


def _set_conversations(translation: ForeignTranslation) -> None:
    """Set a run of SFT: the key of the prompt is then that of the messages."""
    translation.set("algorithm", "sft")
    translation.restrict("sft")
    translation.set("data.messages_key", translation.get("input_key"))
    set_rows(translation, "data.train", translation.get("prompt_data"))
    for key in _FLAGS_OF_SAMPLES:
        translation.skip(key, "conversations are learned as they are")
    translation.skip("global_batch_size", "runtime.prompts_per_step")
    translation.skip("calculate_per_token_loss", "the loss is the mean of all tokens")
    translation.drop(POLICY, "runtime.samples_per_prompt")
    translation.set("runtime.prompts_per_step", translation.get("global_batch_size"))


def _set_loss(translation: ForeignTranslation, algorithm: str) -> None:
    per_token = bool(translation.get("calculate_per_token_loss", False))
    translation.set("loss.aggregation", "token_mean" if per_token else "sequence_mean_token_mean")
    if translation.get("disable_grpo_std_normalization", False) and algorithm in ("grpo", "gspo", "cispo"):
        translation.set("advantage.scale", "none")
    coef = translation.number("kl_loss_coef", 0.0)
    set_divergence(
        translation,
        algorithm,
        in_reward=translation.number("kl_coef", 0.0),
        in_loss=coef if translation.get("use_kl_loss", False) else 0.0,
        estimator=translation.get("kl_loss_type"),
        keys=("kl_coef", "use_kl_loss", "kl_loss_type"),
    )
    high, low = translation.number("tis_clip", 2.0), translation.number("tis_clip_low", 0)
    if translation.get("use_tis", False):
        translation.set("loss.is_level", "token")
        translation.set("loss.is_high", high)
        translation.set("loss.is_low", low or None)


def _set_rewards(translation: ForeignTranslation) -> None:
    path, rm_type, url = (translation.get_text(name) for name in ("custom_rm_path", "rm_type", "rm_url"))
    if path:
        reward = wrap_function(translation, path)
    elif rm_type == "remote_rm" and url:
        reward = {"fn": "remote", "url": url}
    else:
        reward = {"fn": _REWARDS.get(str(rm_type), f"<a function that does what slime's rm_type {rm_type} does>")}
    translation.set("reward", [reward])
    for name in ("custom_generate_function_path", "rollout_function_path"):
        translation.refuse(name, "rollouts of your own are an environment here (`rollout`, docs/environments.md)")
    if translation.get("dynamic_sampling_filter_path"):
        translation.set("filter.fn", "varied")
