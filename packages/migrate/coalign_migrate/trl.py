"""TRL: what several of its arguments decide together."""

from __future__ import annotations

import re
from typing import Any

from coalign_migrate.keys.foreign_keys import POLICY, SAMPLING, TRAINER, load_keys
from coalign_migrate.translation import (
    ForeignTranslation,
    list_values,
    name_data,
    set_adapter,
    set_policy_parallel,
    set_reward_models,
    set_trackers,
    set_warmup,
    wrap_function,
)

TRAINERS = {"sft": "sft", "dpo": "dpo", "kto": "kto", "reward": "reward_model", "grpo": "grpo", "rloo": "rloo"}
TRAINERS |= {"orpo": "orpo", "cpo": "simpo", "ppo": "ppo", "online_dpo": "online_dpo", "prm": "process_reward"}
_ONLINE = ("grpo", "rloo", "ppo", "online_dpo")
_RATES = {"sft": 2e-5, "reward": 1e-4, "ppo": 3e-6, "online_dpo": 5e-7, "prm": 1e-5}  # other trainers have 1e-6
_MARKS = {  # arguments that one trainer alone has
    "ppo": ("num_ppo_epochs", "cliprange_value", "vf_coef"),
    "cpo": ("cpo_alpha", "simpo_gamma"),
    "grpo": ("num_generations", "reward_funcs", "max_completion_length", "epsilon", "scale_rewards"),
    "kto": ("desirable_weight", "undesirable_weight"),
    "reward": ("center_rewards_coefficient",),
    "dpo": ("beta", "loss_type", "label_smoothing"),
    "sft": ("packing", "assistant_only_loss", "dataset_text_field", "completion_only_loss"),
}
_AGGREGATIONS = {"dapo": "token_mean", "bnpo": "token_mean", "grpo": "sequence_mean_token_mean", "dr_grpo": "constant"}
_PAIRWISE = ("ipo", "hinge", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop", "aot")
_CORRECTIONS = {"token": "token", "sequence": "product"}  # what stands before `_truncate` or `_mask`
_REWARDS = {"accuracy_reward": "math", "trl.rewards.accuracy_reward": "math", "accuracy": "math"}


def find_trainer(program: str | None, values: dict[str, Any]) -> str:
    """Return the trainer of a program such as `run_grpo`, or that of a file by the arguments that one alone has.

    ValueError if nothing says it.
    """
    if program:
        words = f"_{program}_"
        if name := next((name for name in sorted(TRAINERS, key=len, reverse=True) if f"_{name}_" in words), None):
            return name
        raise ValueError(
            f"nothing says which of TRL's trainers {program} is for; if it is for one of {', '.join(TRAINERS)}, add it "
            "as `--trainer`"
        )
    for trainer, marks in _MARKS.items():
        if any(name in values for name in marks):
            return trainer
    raise ValueError(
        f"no argument says which of TRL's trainers the file is for; add `--trainer` with one of {', '.join(TRAINERS)}"
    )


def translate_trl(trainer: str, values: dict[str, Any]) -> ForeignTranslation:
    """Translate the arguments of `trl sft`, `trl grpo` and so on, or of a trainer in Python."""
    translation = ForeignTranslation(load_keys("trl"), values, main=find_main(trainer))
    translation.set(f"{TRAINER}.optimizer.lr", _RATES.get(trainer, 1e-6))
    translation.copy_same()
    _set_data(translation)
    set_trainer(translation, trainer)
    return translation


def find_main(trainer: str) -> str:
    """Return the model that the weights of a trainer belong to."""
    return "policy" if trainer in _ONLINE else "trainer"


def set_trainer(translation: ForeignTranslation, trainer: str) -> None:
    """Set sizes, optimizer, loss, rewards and adapters, as TRL's trainer and those that wrap it have them."""
    online = trainer in _ONLINE
    translation.set("algorithm", TRAINERS[trainer])
    _set_sizes(translation, online=online)
    _set_training_arguments(translation)
    if trainer == "ppo":
        _set_ppo(translation)
    elif trainer == "online_dpo":
        _set_pairs_loss(translation)
    elif online:
        _set_policy_loss(translation, trainer)
    else:
        _set_offline_loss(translation, trainer)
    if online:
        _set_rewards(translation)
        _set_rollout(translation)
    _set_adapter(translation)
    set_policy_parallel(translation)


def _set_sizes(translation: ForeignTranslation, *, online: bool) -> None:
    """Set the rows of a step: theirs count those of one device and one micro-batch."""
    micros, processes = translation.get("gradient_accumulation_steps"), translation.get("num_processes")
    update = translation.get("per_device_train_batch_size") * micros * (processes or 1)
    if processes is None:
        translation.notes.append(
            f"runtime.prompts_per_step is for one process of {translation.keys.name}; multiply it by their number"
        )
    if not online or translation.run["algorithm"] in ("ppo", "online_dpo"):
        translation.set("runtime.prompts_per_step", update)
        length = translation.get("response_length", translation.get("max_new_tokens"))
        translation.set(f"{SAMPLING}.max_new_tokens", length or None if online else None)
        return
    samples = translation.run.setdefault("runtime.samples_per_prompt", 8)
    steps, batch = translation.get("steps_per_generation"), translation.get("generation_batch_size")
    batch = batch or (update * steps // micros if steps else update)
    translation.set("runtime.prompts_per_step", max(1, batch // samples))
    if batch > update:
        translation.set(f"{TRAINER}.updates_per_batch", round(batch / update))
    translation.run.setdefault(f"{SAMPLING}.max_new_tokens", 256)


def _set_data(translation: ForeignTranslation) -> None:
    name, config = translation.get("dataset_name"), translation.get("dataset_config")
    mixture = translation.get("datasets")
    train = translation.get("dataset_train_split", "train")
    test, rows = translation.get("dataset_test_split", "test"), translation.get("train_dataset")
    if name:
        translation.set("data.train", [name_data(name, train, config)])
        if test and translation.get("eval_strategy", "no") != "no":
            translation.set("data.eval", [name_data(name, test, config)])
    elif rows:
        translation.set("data.train", [name_data(rows)])
    elif mixture:  # TRL's DatasetConfig
        names = [(item.get("path"), item.get("split", train), item.get("name")) for item in mixture]
        translation.set("data.train", [name_data(path, split, config) for path, split, config in names if path])
    if eval_rows := translation.get("eval_dataset"):
        translation.set("data.eval", [name_data(eval_rows)])


def _set_training_arguments(translation: ForeignTranslation) -> None:
    """Set what transformers' TrainingArguments decide together. TRL multiplies in bfloat16 by default."""
    _set_optimizer(translation)
    _set_intervals(translation)
    half, full = translation.get("fp16", False), translation.get("bf16", True)
    translation.set(f"models.{translation.main}.compute_dtype", "bfloat16" if half or full else "float32")
    if half:
        translation.refuse("fp16", "products are in bfloat16, which has the range of float32")
    set_trackers(translation, "project", "run_name")


def _set_optimizer(translation: ForeignTranslation) -> None:
    schedule = translation.run.setdefault(f"{TRAINER}.optimizer.schedule", "linear")  # transformers' own
    betas = [translation.number("adam_beta1", 0.9), translation.number("adam_beta2", 0.999)]
    if betas != [0.9, 0.999]:
        translation.set(f"{TRAINER}.optimizer.betas", betas)
    least = translation.get("lr_scheduler_kwargs")
    if isinstance(least, dict) and schedule != "constant":
        translation.set(f"{TRAINER}.optimizer.min_lr_ratio", least.get("min_lr_rate"))
    name = str(translation.get("optim", "adamw_torch"))
    names = {"adafactor": "adafactor", "muon": "muon"}
    names |= dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "adamw_8bit")
    if name in names:
        translation.set(f"{TRAINER}.optimizer.name", names[name])
    elif not re.match(r"(paged_)?adamw", name):
        translation.refuse("optim", "see models.trainer.optimizer.name; the run takes adamw")
    warmup = translation.get("warmup_steps")
    is_share = bool(warmup) and warmup < 1  # since transformers 5
    if is_share:
        translation.given["warmup_ratio"] = warmup
    else:
        translation.set(f"{TRAINER}.optimizer.warmup", int(warmup) if warmup else None)
    set_warmup(translation, "warmup_ratio", named="warmup_steps" if is_share else "warmup_ratio")


def _set_intervals(translation: ForeignTranslation) -> None:
    for name, ours in {"eval": "runtime.eval_every", "save": "runtime.save_every"}.items():
        steps, strategy = translation.get(f"{name}_steps"), translation.get(f"{name}_strategy")
        if strategy == "epoch":
            translation.refuse(f"{name}_strategy", f"set {ours} in steps")
        elif steps and 0 < steps < 1:
            translation.refuse(f"{name}_steps", f"{steps:g} of the run; set {ours} in steps")
        elif steps and steps > 0 and strategy != "no":
            translation.set(ours, int(steps))


def _set_ppo(translation: ForeignTranslation) -> None:
    """Set the loss of PPO, with TRL's defaults."""
    clip = translation.number("cliprange", 0.2)
    translation.set("loss.clip_low", clip)
    translation.set("loss.clip_high", clip)
    translation.set("kl.coef", translation.number("kl_coef", 0.05))
    translation.set("models.value.loss.clip", translation.number("cliprange_value", 0.2))
    translation.set("models.value.load", translation.get("value_model"))
    translation.set("advantage.gamma", translation.number("gamma", 1.0))
    translation.set("advantage.lam", translation.number("lam", 0.95))
    translation.set(f"{TRAINER}.epochs_per_batch", translation.get("num_ppo_epochs", 4))
    translation.set(f"{TRAINER}.updates_per_batch", translation.get("num_mini_batches", 1))


def _set_pairs_loss(translation: ForeignTranslation) -> None:
    translation.set("loss.beta", translation.number("beta", 0.1))
    loss_type = translation.get("loss_type", "sigmoid")
    translation.set("loss.fn", {"sigmoid": "dpo", "ipo": "ipo"}.get(loss_type, "dpo"))
    if loss_type not in ("sigmoid", "ipo"):
        translation.refuse("loss_type", "see the table of names in docs/writing_a_loss.md")


def _set_policy_loss(translation: ForeignTranslation, trainer: str) -> None:
    loss_type = translation.get("loss_type", "dapo")
    low = translation.number("epsilon", 0.2)
    high = translation.number("epsilon_high", low)
    algorithm = loss_type if loss_type in ("cispo", "sapo") else TRAINERS[trainer]
    if translation.get("importance_sampling_level", "token") == "sequence":
        algorithm = "gspo"
    translation.set("algorithm", algorithm)
    if algorithm == "cispo":
        translation.set("loss.clip_high", high - 1.0 if high > 1.0 else None)
    elif algorithm != "sapo":
        translation.set("loss.clip_low", low)
        translation.set("loss.clip_high", high)
    if loss_type in _AGGREGATIONS and trainer == "grpo":
        mean = _AGGREGATIONS[loss_type]
        translation.set("loss.aggregation", "sequence_mean_token_mean" if algorithm == "gspo" else mean)
        if mean == "constant" and algorithm != "gspo":
            translation.set("loss.constant_length", translation.run[f"{SAMPLING}.max_new_tokens"])
    elif loss_type not in ("cispo", "sapo"):
        translation.refuse("loss_type", "no such mean here; see `loss.aggregation` in docs/algorithms.md")
    translation.set("loss.dual_clip", translation.number("delta") or None)
    beta = translation.number("beta", 0.0 if trainer == "grpo" else 0.05)
    translation.set("loss.kl_coef" if trainer == "grpo" else "kl.coef", beta)
    scale = translation.get("scale_rewards")
    scales = {"group": "std", True: "std", "batch": "batch", "none": "none", False: "none"}
    if scale in scales and trainer == "grpo":
        translation.set("advantage.scale", scales[scale])
    elif scale is not None:
        translation.refuse("scale_rewards", "advantage.scale is std, batch or none")
    if translation.get("mask_truncated_completions", False):
        translation.set("truncated.fn", "mask_truncated")


def _set_rewards(translation: ForeignTranslation) -> None:
    names, weights = translation.get("reward_funcs"), translation.get("reward_weights")
    models = list_values(translation.get("reward_model_name_or_path") or [])
    rewards: list[dict[str, Any]] = []
    for name in list_values(names or []):
        if name in _REWARDS:
            rewards.append({"fn": _REWARDS[name]})
        elif "/" in name:  # a model of the hub
            models.append(name)
        else:
            rewards.append(wrap_function(translation, name))
    rewards += set_reward_models(translation, models)
    for reward, weight in zip(rewards, list_values(weights) if weights else [], strict=False):
        reward["weight"] = float(weight)
    translation.set("reward", rewards or None)


def _set_rollout(translation: ForeignTranslation) -> None:
    uses, corrects = translation.get("use_vllm", False), translation.get("vllm_importance_sampling_correction", True)
    mode = translation.get("vllm_importance_sampling_mode", "sequence_mask")
    cap = translation.number("vllm_importance_sampling_cap", 3.0)
    if translation.get("vllm_mode") == "server":
        translation.notes.append("models.policy: TRL's vLLM server is a process of the run here (docs/placement.md)")
    if not uses:
        return
    translation.set(f"{POLICY}.module", "vllm")
    level, _, bound = mode.partition("_")
    if corrects and level in _CORRECTIONS and translation.run["algorithm"] != "online_dpo":
        translation.set("loss.is_level", _CORRECTIONS[level])
        translation.set("loss.is_mode", bound)
        translation.set("loss.is_high", cap)


def _set_offline_loss(translation: ForeignTranslation, trainer: str) -> None:
    if trainer in ("orpo", "cpo"):
        return _set_reference_free_loss(translation, trainer)
    smoothing = translation.number("label_smoothing")
    loss_types = list_values(translation.get("loss_type", "sigmoid" if trainer == "dpo" else trainer))
    if trainer == "dpo":
        loss_type = str(loss_types[0])
        translation.set("loss.fn", loss_type if loss_type in _PAIRWISE else "dpo")
        if loss_type not in (*_PAIRWISE, "sigmoid", "robust", "sigmoid_norm") or len(loss_types) > 1:
            translation.refuse("loss_type", "see the table of names in docs/writing_a_loss.md")
        translation.set("loss.robust", True if loss_type == "robust" else None)
        translation.set("loss.length_normalised", True if loss_type == "sigmoid_norm" else None)
        translation.set("loss.label_smoothing", smoothing or None if translation.run["loss.fn"] == "dpo" else None)
    if trainer in ("dpo", "kto"):
        translation.set("loss.beta", translation.number("beta", 0.1))
        translation.set("models.reference.load", translation.get("ref_model"))
    if trainer == "kto":
        for name in ("desirable_weight", "undesirable_weight"):
            translation.set(f"loss.{name}", translation.number(name))
    if trainer == "reward":
        translation.set("loss.centre_coef", translation.number("center_rewards_coefficient") or None)
    assistant, completion = translation.get("assistant_only_loss"), translation.get("completion_only_loss")
    if trainer == "sft" and not assistant is completion is None:
        translation.set("data.train_on", "assistant" if assistant else "last" if completion else "all")


def _set_reference_free_loss(translation: ForeignTranslation, trainer: str) -> None:
    """Set the loss of ORPO, CPO or SimPO, which is a `loss_type` of CPO."""
    translation.set("loss.beta", translation.number("beta", 0.1))
    if trainer == "orpo":
        return
    loss_type, nll = translation.get("loss_type", "sigmoid"), translation.number("cpo_alpha", 1.0)
    margin = translation.get("simpo_gamma", 0.5)
    if loss_type == "simpo":
        translation.set("loss.fn", "simpo")
        translation.set("loss.gamma", float(margin))
        translation.set("loss.nll_coef", nll or None)
        return
    translation.set("loss.fn", "cpo")
    translation.set("loss.nll_coef", nll)
    if loss_type != "sigmoid":
        translation.refuse("loss_type", "losses without a reference are cpo and simpo")


def _set_adapter(translation: ForeignTranslation) -> None:
    if not translation.get("use_peft", False):
        for name in ("lora_*", "use_rslora", "use_dora", "load_in_4bit"):
            translation.skip(name, "use_peft is not set")
        return
    translation.presume(lora_r=16, lora_alpha=32)
    set_adapter(translation, "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")
    for name, ours in {"use_rslora": "rslora", "use_dora": "dora"}.items():
        translation.set(f"{TRAINER}.lora.{ours}", translation.get(name) or None)
    if translation.get("load_in_4bit", False):
        translation.set(f"{TRAINER}.lora.base_bits", 4)
