"""OpenRLHF: what several of its flags decide together."""

from __future__ import annotations

from typing import Any

from coalign.config.errors import suggest
from coalign_migrate.keys.foreign_keys import POLICY, SAMPLING, TRAINER, VALUE
from coalign_migrate.keys.openrlhf import OPENRLHF, OPENRLHF_OFFLINE
from coalign_migrate.translation import (
    ForeignTranslation,
    count_updates,
    list_values,
    name_data,
    set_adapter,
    set_policy_parallel,
    set_reference,
    set_trackers,
)
from coalign_migrate.verl import KL_IN_REWARD

_ESTIMATORS = {
    "gae": "ppo",
    "reinforce": "reinforce_pp",
    "rloo": "rloo",
    "reinforce_baseline": "reinforce_pp_baseline",
    "group_norm": "grpo",
    "dr_grpo": "dr_grpo",
}
PROGRAMS = {
    "train_sft": "sft",
    "train_rm": "reward_model",
    "train_dpo": "dpo",
    "train_kto": "kto",
    "train_prm": "process_reward",
}


def translate_openrlhf(program: str, values: dict[str, Any]) -> ForeignTranslation:
    """Translate the flags of a program such as `train_ppo_ray`. ValueError for one that has no recipe here."""
    if program in PROGRAMS:
        return _translate_offline(program, values)
    if program != "train_ppo_ray":
        programs = ["train_ppo_ray", *PROGRAMS]
        raise ValueError(f"openrlhf.cli.{program} has no recipe here{suggest(program, programs)}")
    return _translate_online(values)


def _translate_online(values: dict[str, Any]) -> ForeignTranslation:
    translation = ForeignTranslation(OPENRLHF, values, main="policy")
    estimator = translation.get("advantage_estimator")
    if estimator not in _ESTIMATORS:
        estimators = ", ".join(_ESTIMATORS)
        raise ValueError(f"the advantage estimator {estimator} has no recipe here; there are recipes for {estimators}")
    algorithm = _ESTIMATORS[estimator]
    if translation.get("policy_loss_type", "ppo") == "gspo":
        if algorithm == "grpo":
            algorithm = "gspo"
        else:
            translation.refuse("policy_loss_type", f"`gspo` stands for the advantage group_norm, not for {estimator}")
    translation.set("algorithm", algorithm)
    translation.copy_same()
    translation.set(f"{POLICY}.load", translation.get("pretrain"))
    _set_lengths(translation)
    _set_advantage(translation, algorithm)
    _set_loss(translation, algorithm)
    _set_kl(translation, algorithm)
    set_reference(translation)
    _set_rewards(translation)
    _set_value(translation, algorithm)
    _set_rollout(translation)
    _set_data(translation, "prompt_data", "prompt_data_probs", "prompt_split", label=translation.get("label_key"))
    _set_common(translation)
    batch = translation.get("rollout_batch_size") * translation.get("n_samples_per_prompt")
    updates = count_updates(translation, batch, translation.get("train_batch_size"), "train_batch_size (of samples)")
    translation.set(f"{TRAINER}.updates_per_batch", updates)
    set_policy_parallel(translation)
    return translation


def _translate_offline(program: str, values: dict[str, Any]) -> ForeignTranslation:
    translation = ForeignTranslation(OPENRLHF_OFFLINE, values, main="trainer")
    algorithm = PROGRAMS[program]
    if translation.get("pretrain_mode", False) and algorithm == "sft":
        algorithm = "pretrain"
    translation.set("algorithm", algorithm)
    translation.copy_same()
    translation.set(f"{TRAINER}.load", translation.get("pretrain"))
    reference = translation.get("ref_pretrain")
    if reference and algorithm in ("dpo", "kto"):
        translation.set("models.reference.load", reference)
    if algorithm in ("dpo", "kto"):
        fn = "ipo" if translation.get("ipo", False) else algorithm
        translation.set("loss.fn", fn)
        translation.set("loss.beta", float(translation.get("beta", 0.1)))
        smoothing, nll = translation.get("label_smoothing"), translation.get("nll_loss_coef")
        if smoothing and fn == "dpo":
            translation.set("loss.label_smoothing", float(smoothing))
        if nll and fn != "kto":
            translation.set("loss.nll_coef", float(nll))
    _set_data(translation, "dataset", "dataset_probs", "train_split")
    if translation.get("apply_chat_template", False) and not translation.has("output_key"):
        key = translation.run.pop("data.prompt_key", None)
        if algorithm == "sft":
            translation.set("data.messages_key", key)
    _set_common(translation)
    return translation


def _set_common(translation: ForeignTranslation) -> None:
    """Set what all programs share: templates, adapters, schedule, averages, trackers."""
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
        translation.run.pop(f"{TRAINER}.deepspeed.offload_optimizer", None)
    least = translation.get("min_lr_ratio", 0.1)
    if translation.get("lr_scheduler") == "cosine_with_min_lr":
        translation.set(f"{TRAINER}.optimizer.min_lr_ratio", float(least))
    translation.convert_warmup("lr_warmup_ratio")
    decay = translation.get("ema_beta", 0.992)
    if translation.get("enable_ema", False):
        translation.set(f"{TRAINER}.ema.decay", float(decay))
    used = {"wandb": "use_wandb", "tensorboard": "use_tensorboard"}
    trackers = [name for name, key in used.items() if key in translation.unknown or translation.get(key)]
    for key in used.values():
        translation.hide(key)  # a secret, or a folder
    translation.set("runtime.trackers", trackers or None)
    set_trackers(translation, "wandb_project", "wandb_run_name")


def _set_data(translation: ForeignTranslation, data: str, probabilities: str, split: str, label: Any = None) -> None:
    weights = translation.get(probabilities)
    max_rows = translation.get("max_samples")
    shares = [float(share) for share in list_values(weights)] if weights is not None else []
    keys = {"keys": {"answer": label}} if label else {}
    for key, ours, split_key in ((data, "data.train", split), ("eval_dataset", "data.eval", "eval_split")):
        names, which = translation.get(key), translation.get(split_key)
        if not names:
            if which is not None:
                translation.refuse(split_key, f"without {key} there are no such rows")
            continue
        sources: list[dict[str, Any]] = [
            {"path": name_data(name, which or "train"), **keys} for name in list_values(names)
        ]
        if ours == "data.train":
            for source, share in zip(sources, shares, strict=False):
                source |= {"weight": share} if len(sources) > 1 else {}
            for source in sources:
                source |= {"max_samples": int(max_rows)} if max_rows else {}
        translation.set(ours, sources)


def _set_advantage(translation: ForeignTranslation, algorithm: str) -> None:
    gamma, lam = float(translation.get("gamma")), float(translation.get("lambd"))
    translation.set_discounts(algorithm, gamma, lam)
    if translation.get("no_advantage_std_norm", False) and algorithm in ("grpo", "gspo"):
        translation.set("advantage.scale", "none")


def _set_loss(translation: ForeignTranslation, algorithm: str) -> None:
    clip = float(translation.get("eps_clip"))
    low, high = map(float, translation.get("eps_clip_low_high", (clip, clip)))
    if algorithm != "gspo" or translation.has("eps_clip", "eps_clip_low_high"):
        translation.set("loss.clip_low", low)
        translation.set("loss.clip_high", high)
    dual, entropy = translation.get("dual_clip"), translation.get("entropy_loss_coef")
    translation.set("loss.dual_clip", None if dual is None else float(dual))
    if entropy:
        translation.set("loss.entropy_coef", float(entropy))
    elif entropy is not None:
        translation.set("loss.measure_entropy", True)
    _set_correction(translation)


def _set_correction(translation: ForeignTranslation) -> None:
    """Set the importance weights of sampled tokens; since 0.9.3 they have two thresholds."""
    bounds = list_values(translation.get("vllm_is_truncated_threshold", (0.5, 5.0) if _is_newer(translation) else 2.0))
    method = translation.get("vllm_is_correction_type", "tis")
    if not translation.get("enable_vllm_is_correction", False):
        return
    translation.set("loss.is_level", "sequence" if method == "seq-mask-tis" else "token")
    translation.set("loss.is_mode", None if method == "tis" else "mask")
    if len(bounds) > 1:
        translation.set("loss.is_low", float(bounds[0]))
    translation.set("loss.is_high", float(bounds[-1]))


def _is_newer(translation: ForeignTranslation) -> bool:
    """Whether the flags are those since 0.10, which have sections."""
    return any("." in name for name in translation.names.values())


def _set_lengths(translation: ForeignTranslation) -> None:
    """Set the limits of prompts and answers. Since 0.10 one limit is for both together."""
    total, prompt = translation.get("max_len", 2048), translation.get("prompt_max_len")
    answer = translation.run.get(f"{SAMPLING}.max_new_tokens")
    if prompt is None and answer is None:
        if not translation.has("max_len"):
            prompt, answer = 1024, 1024  # before 0.10
        else:
            translation.notes.append(f"OpenRLHF bounds prompt and answer together to {total}; here each has a limit")
    prompt = prompt or (total - answer if answer and answer < total and translation.has("max_len") else None)
    translation.set("data.max_prompt_tokens", prompt or (total if translation.has("max_len") else 1024))
    translation.set(f"{SAMPLING}.max_new_tokens", answer or (total if translation.has("max_len") else 1024))


def _set_kl(translation: ForeignTranslation, algorithm: str) -> None:
    coef, in_loss = float(translation.get("init_kl_coef")), bool(translation.get("use_kl_loss", False))
    estimator = translation.get("kl_estimator", "k1")
    for key in ("kl_target", "kl_horizon"):
        translation.refuse(key, "OpenRLHF's target is nats per token, Coalign's `kl.target` nats per response")
    if algorithm in KL_IN_REWARD:
        translation.set("kl.coef", coef)
        if in_loss:
            translation.refuse("use_kl_loss", f"`{algorithm}` charges the divergence in the reward (`kl`)")
        if estimator != "k1":
            translation.refuse("kl_estimator", "the divergence in the reward is k1")
        return
    translation.set("loss.kl_coef", coef if in_loss else 0.0)
    if in_loss:
        translation.set("loss.kl_estimator", estimator)
    elif coef:
        translation.refuse(
            "init_kl_coef", f"`{algorithm}` charges the divergence in the loss, and use_kl_loss is not set"
        )


def _set_rewards(translation: ForeignTranslation) -> None:
    remote, models = translation.get("remote_rm_url"), translation.get("reward_pretrain")
    clip = translation.get("reward_clip_range")
    common: dict[str, Any] = {"normalise": "running"} if translation.get("normalize_reward", False) else {}
    if clip is not None:
        low, high = map(float, list_values(clip))
        if -low == high:
            common["clip"] = high
        else:
            translation.refuse("reward_clip_range", "limits are symmetric here (`reward[].clip`)")
    rewards: list[dict[str, Any]] = []
    for number, path in enumerate(list_values(models) if models and not remote else [], start=1):
        name = "reward" if number == 1 else f"reward_{number}"
        translation.set(f"models.{name}", {"module": "fsdp", "load": path, "head": "reward", "frozen": True})
        rewards.append({"model": name, **common})
    urls = list_values(remote) if remote else []
    if urls and str(urls[0]).endswith(".py"):
        rewards.append({"fn": f"<a function that calls reward_func of {urls[0]}>", **common})
        translation.notes.append(
            f"reward: reward_func of {urls[0]} has OpenRLHF's signature; wrap it as docs/writing_a_reward.md, \"From "
            'another library", shows'
        )
    elif urls:
        rewards.append({"fn": "remote", "url": urls, **common})
    buffer, factor = translation.get("overlong_buffer_len"), translation.get("overlong_penalty_factor", 1.0)
    if buffer:
        limit = translation.run[f"{SAMPLING}.max_new_tokens"]
        rewards.append({"fn": "length_penalty", "weight": float(factor), "max_tokens": limit, "buffer": int(buffer)})
    translation.set("reward", rewards or None)


def _set_value(translation: ForeignTranslation, algorithm: str) -> None:
    names = ("critic_pretrain", "critic_learning_rate", "value_clip", "freezing_actor_steps")
    path, lr, clip, frozen = (translation.get(name) for name in names)
    if algorithm != "ppo":
        for name in names:
            translation.refuse(name, f"`{algorithm}` has no value model")
        return
    translation.set(f"{VALUE}.load", path)
    translation.set(f"{VALUE}.optimizer.lr", float(lr))
    translation.set(f"{VALUE}.loss.clip", float(clip))
    translation.set(f"{TRAINER}.learns_after", frozen if frozen and frozen > 0 else None)


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
