"""OpenRLHF: what several of its flags decide together."""

from __future__ import annotations

from typing import Any

from coalign.config.errors import suggest
from coalign_migrate.keys.foreign_keys import POLICY, SAMPLING, TRAINER, load_keys
from coalign_migrate.translation import (
    KL_IN_REWARD,
    ForeignTranslation,
    count_updates,
    list_values,
    look_up,
    set_adapter,
    set_divergence,
    set_policy_parallel,
    set_reward_models,
    set_rows,
    set_trackers,
    set_warmup,
    wrap_function,
)

_ESTIMATORS = {
    "gae": "ppo",
    "reinforce": "reinforce_pp",
    "rloo": "rloo",
    "reinforce_baseline": "reinforce_pp_baseline",
    "group_norm": "grpo",
    "dr_grpo": "dr_grpo",
}
_PROGRAMS = {"train_sft": "sft", "train_rm": "reward_model", "train_dpo": "dpo", "train_kto": "kto"}
_PROGRAMS |= {"train_prm": "process_reward"}


def translate_openrlhf(program: str, values: dict[str, Any]) -> ForeignTranslation:
    """Translate the flags of a program such as `train_ppo_ray`. ValueError for one that has no recipe here."""
    if program in _PROGRAMS:
        return _translate_offline(_PROGRAMS[program], values)
    if program != "train_ppo_ray":
        programs = ["train_ppo_ray", *_PROGRAMS]
        raise ValueError(f"openrlhf.cli.{program} has no recipe here{suggest(program, programs)}")
    return _translate_online(values)


def _translate_online(values: dict[str, Any]) -> ForeignTranslation:
    translation = ForeignTranslation(load_keys("openrlhf"), values, main="policy")
    estimator = translation.get("advantage_estimator")
    algorithm = look_up(_ESTIMATORS, estimator, f"the advantage estimator {estimator}")
    if translation.get("policy_loss_type", "ppo") == "gspo":
        if algorithm == "grpo":
            algorithm = "gspo"
        else:
            translation.refuse("policy_loss_type", f"`gspo` stands for the advantage group_norm, not for {estimator}")
    translation.set("algorithm", algorithm)
    translation.copy_same()
    translation.restrict(algorithm)
    _set_lengths(translation)
    _set_loss(translation, algorithm)
    _set_kl(translation, algorithm)
    _set_rewards(translation)
    _set_rollout(translation)
    _set_rows(translation, "prompt_data", "prompt_data_probs", "prompt_split", label=translation.get("label_key"))
    _set_common(translation)
    batch = translation.get("rollout_batch_size") * translation.get("n_samples_per_prompt")
    updates = count_updates(translation, batch, translation.get("train_batch_size"), "train_batch_size (of samples)")
    translation.set(f"{TRAINER}.updates_per_batch", updates)
    set_policy_parallel(translation)
    return translation


def _translate_offline(algorithm: str, values: dict[str, Any]) -> ForeignTranslation:
    translation = ForeignTranslation(load_keys("openrlhf_offline"), values, main="trainer")
    if translation.get("pretrain_mode", False) and algorithm == "sft":
        algorithm = "pretrain"
    translation.set("algorithm", algorithm)
    translation.copy_same()
    reference = translation.get("ref_pretrain")
    if algorithm in ("dpo", "kto"):
        translation.set("models.reference.load", reference or None)
        fn = "ipo" if translation.get("ipo", False) else algorithm
        translation.set("loss.fn", fn)
        translation.set("loss.beta", translation.number("beta", 0.1))
        smoothing, nll = translation.number("label_smoothing"), translation.number("nll_loss_coef")
        translation.set("loss.label_smoothing", smoothing or None if fn == "dpo" else None)
        translation.set("loss.nll_coef", nll or None if fn != "kto" else None)
    _set_rows(translation, "dataset", "dataset_probs", "train_split")
    if translation.get("apply_chat_template", False) and not translation.has("output_key"):
        key = translation.run.pop("data.prompt_key", None)
        if algorithm == "sft":
            translation.set("data.messages_key", key)
    _set_common(translation)
    return translation


def _set_common(translation: ForeignTranslation) -> None:
    """Set what all programs share: templates, adapters, schedule, trackers."""
    if _is_newer(translation):  # its default
        translation.run.setdefault(f"models.{translation.main}.compute_dtype", "bfloat16")
    templated = translation.get("apply_chat_template", False)
    translation.set("data.chat_template", "auto" if templated else "none")
    if template := translation.get("input_template"):
        text = str(template).replace("{}", "\0").replace("{", "{{").replace("}", "}}").replace("\0", "{prompt}")
        translation.set("data.prompt_format", text)
    set_adapter(translation, "lora_rank", "lora_alpha", "lora_dropout", "target_modules")
    if translation.get("load_in_4bit", False) and f"{TRAINER}.lora.rank" in translation.run:
        translation.set(f"{TRAINER}.lora.base_bits", 4)
    if translation.run.get(f"{TRAINER}.deepspeed.stage"):
        translation.set(f"{TRAINER}.module", "deepspeed")
    else:
        translation.drop(f"{TRAINER}.deepspeed.offload_optimizer")
    least = translation.number("min_lr_ratio", 0.1)
    if translation.get("lr_scheduler") == "cosine_with_min_lr":
        translation.set(f"{TRAINER}.optimizer.min_lr_ratio", least)
    set_warmup(translation, "lr_warmup_ratio")
    used = {"wandb": "use_wandb", "tensorboard": "use_tensorboard"}
    set_trackers(translation, "wandb_project", "wandb_run_name", used)
    for key in used.values():
        translation.hide(key)  # a secret, or a folder


def _set_rows(translation: ForeignTranslation, data: str, probabilities: str, split: str, label: Any = None) -> None:
    weights, max_rows = translation.get(probabilities), translation.get("max_samples")
    keys = {"answer": label} if label else {}
    for key, ours, split_key in ((data, "data.train", split), ("eval_dataset", "data.eval", "eval_split")):
        names, which = translation.get(key), translation.get(split_key)
        if names:
            shared: dict[str, Any] = {"weights": weights, "max_rows": max_rows}
            set_rows(translation, ours, names, keys=keys, split=which or "train", **shared)
        elif which is not None:
            translation.refuse(split_key, f"without {key} there are no such rows")


def _set_loss(translation: ForeignTranslation, algorithm: str) -> None:
    if both := translation.get("eps_clip_low_high"):
        translation.set("loss.clip_low", float(both[0]))
        translation.set("loss.clip_high", float(both[1]))
    elif algorithm == "gspo" and not translation.has("eps_clip"):
        translation.drop("loss.clip_")
    entropy = translation.number("entropy_loss_coef")
    translation.set("loss.entropy_coef", entropy or None)
    if entropy == 0.0:
        translation.set("loss.measure_entropy", True)
    if translation.get("no_advantage_std_norm", False) and algorithm in ("grpo", "gspo"):
        translation.set("advantage.scale", "none")
    bounds = list_values(translation.get("vllm_is_truncated_threshold", (0.5, 5.0) if _is_newer(translation) else 2.0))
    method = translation.get("vllm_is_correction_type", "tis")
    if translation.get("enable_vllm_is_correction", False):  # since 0.9.3 there are two thresholds
        translation.set("loss.is_level", "sequence" if method == "seq-mask-tis" else "token")
        translation.set("loss.is_mode", None if method == "tis" else "mask")
        translation.set("loss.is_low", float(bounds[0]) if len(bounds) > 1 else None)
        translation.set("loss.is_high", float(bounds[-1]))


def _is_newer(translation: ForeignTranslation) -> bool:
    """Whether the flags are those since 0.10, which have sections."""
    return any("." in name for name in translation.names.values())


def _set_lengths(translation: ForeignTranslation) -> None:
    """Set the limits of prompts and answers. Since 0.10 one limit is for both together."""
    has_total = translation.has("max_len")
    total, prompt = translation.get("max_len", 2048), translation.get("prompt_max_len")
    answer = translation.run.get(f"{SAMPLING}.max_new_tokens")
    if prompt is None and answer is None and has_total:
        translation.notes.append(f"OpenRLHF bounds prompt and answer together to {total}; here each has a limit")
    limit = total if has_total else 1024  # before 0.10
    prompt = prompt or (total - answer if answer and answer < total and has_total else None)
    translation.set("data.max_prompt_tokens", prompt or limit)
    translation.set(f"{SAMPLING}.max_new_tokens", answer or limit)


def _set_kl(translation: ForeignTranslation, algorithm: str) -> None:
    coef, in_loss = translation.number("init_kl_coef"), bool(translation.get("use_kl_loss", False))
    estimator = translation.get("kl_estimator", "k1")
    if algorithm in KL_IN_REWARD and estimator != "k1":
        translation.refuse("kl_estimator", "the divergence in the reward is k1")
    set_divergence(
        translation,
        algorithm,
        in_reward=coef if algorithm in KL_IN_REWARD or not in_loss else 0.0,
        in_loss=coef if in_loss else 0.0,
        estimator=estimator,
        keys=("init_kl_coef", "use_kl_loss", "kl_estimator"),
    )


def _set_rewards(translation: ForeignTranslation) -> None:
    remote, models = translation.get("remote_rm_url"), translation.get("reward_pretrain")
    common: dict[str, Any] = {"normalise": "running"} if translation.get("normalize_reward", False) else {}
    rewards = set_reward_models(translation, list_values(models) if models and not remote else [], **common)
    urls = list_values(remote) if remote else []
    if urls and str(urls[0]).endswith(".py"):
        rewards.append(wrap_function(translation, f"reward_func of {urls[0]}") | common)
    elif urls:
        rewards.append({"fn": "remote", "url": urls, **common})
    translation.set("reward", rewards or None)


def _set_rollout(translation: ForeignTranslation) -> None:
    translation.set(f"{POLICY}.module", "vllm" if (translation.get("vllm_num_engines") or 0) > 0 else "transformers")
    queue = translation.get("async_queue_size", 1)
    if translation.get("async_train", False):
        translation.set("runtime.max_staleness", queue)
    low, high = map(float, translation.get("dynamic_filtering_reward_range", (0, 1)))
    if translation.get("dynamic_filtering", False):
        translation.set("filter.fn", "varied")
        if (low, high) != (0.0, 1.0):
            translation.refuse("dynamic_filtering_reward_range", "`filter: varied` keeps groups whose rewards differ")
