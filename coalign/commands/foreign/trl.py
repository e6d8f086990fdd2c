"""TRL: what several of its arguments decide together."""

from __future__ import annotations

from typing import Any

from coalign.commands.foreign.translation import (
    ForeignTranslation,
    list_values,
    name_data,
    set_adapter,
    set_policy_parallel,
)
from coalign.config.foreign_keys import POLICY, TRAINER, TRL

TRAINERS = {"sft": "sft", "dpo": "dpo", "kto": "kto", "reward": "reward_model", "grpo": "grpo", "rloo": "rloo"}
_MARKS = {  # arguments that one trainer alone has
    "grpo": ("num_generations", "reward_funcs", "max_completion_length", "epsilon", "scale_rewards"),
    "kto": ("desirable_weight", "undesirable_weight"),
    "reward": ("center_rewards_coefficient",),
    "dpo": ("beta", "loss_type", "label_smoothing"),
    "sft": ("packing", "assistant_only_loss", "dataset_text_field", "completion_only_loss"),
}
_AGGREGATIONS = {"dapo": "token_mean", "bnpo": "token_mean", "grpo": "sequence_mean_token_mean", "dr_grpo": "constant"}
_PAIRWISE = ("ipo", "hinge", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop", "aot")
_CORRECTIONS = {
    "token_truncate": ("token", "truncate"),
    "token_mask": ("token", "mask"),
    "sequence_truncate": ("product", "truncate"),
    "sequence_mask": ("product", "mask"),
}
_REWARDS = {"accuracy_reward": "math", "trl.rewards.accuracy_reward": "math"}


def find_trainer(values: dict[str, Any]) -> str:
    """Return the trainer that a file is for, by the arguments that one alone has. ValueError if none says."""
    for trainer, marks in _MARKS.items():
        if any(name in values for name in marks):
            return trainer
    raise ValueError(
        f"no argument says which of TRL's trainers the file is for; add `--trainer` with one of {', '.join(TRAINERS)}"
    )


def translate_trl(trainer: str, values: dict[str, Any]) -> ForeignTranslation:
    """Translate the arguments of `trl sft`, `trl dpo`, `trl kto`, `trl reward`, `trl grpo` or `trl rloo`."""
    online = trainer in ("grpo", "rloo")
    translation = ForeignTranslation(TRL, values, main="policy" if online else "trainer")
    translation.set("algorithm", TRAINERS[trainer])
    translation.copy_same()
    translation.set(f"models.{translation.main}.load", translation.get("model_name_or_path"))
    _set_sizes(translation, online=online)
    _set_data(translation)
    _set_optimizer(translation)
    _set_intervals(translation)
    if online:
        _set_policy_loss(translation, trainer)
        _set_rewards(translation)
        _set_rollout(translation)
    else:
        _set_offline_loss(translation, trainer)
    _set_adapter(translation)
    set_policy_parallel(translation)
    return translation


def _set_sizes(translation: ForeignTranslation, *, online: bool) -> None:
    """Set the rows of a step: theirs count samples of one device and one micro-batch."""
    rows, micros = translation.get("per_device_train_batch_size"), translation.get("gradient_accumulation_steps")
    processes = translation.get("num_processes")
    if processes is None:
        translation.notes.append("runtime.prompts_per_step is for one process of TRL; multiply it by their number")
    update = rows * micros * (processes or 1)
    if not online:
        return translation.set("runtime.prompts_per_step", update)
    samples = translation.run.setdefault("runtime.samples_per_prompt", 8)
    steps, batch = translation.get("steps_per_generation"), translation.get("generation_batch_size")
    batch = batch or rows * (steps or micros) * (processes or 1)
    translation.set("runtime.prompts_per_step", max(1, batch // samples))
    if batch > update:
        translation.set(f"{TRAINER}.updates_per_batch", round(batch / update))
    translation.run.setdefault(f"{POLICY}.sampling.max_new_tokens", 256)


def _set_data(translation: ForeignTranslation) -> None:
    name, config = translation.get("dataset_name"), translation.get("dataset_config")
    train = translation.get("dataset_train_split", "train")
    test, rows = translation.get("dataset_test_split"), translation.get("train_dataset")
    if name:
        translation.set("data.train", [name_data(name, train, config)])
        if test and translation.get("eval_strategy", "no") != "no":
            translation.set("data.eval", [name_data(name, test, config)])
    elif rows:
        translation.set("data.train", [name_data(rows)])
    if other := translation.get("eval_dataset"):
        translation.set("data.eval", [name_data(other)])
    only = translation.get("assistant_only_loss")
    if only is not None:
        translation.set("data.train_on", "assistant" if only else "all")


def _set_optimizer(translation: ForeignTranslation) -> None:
    translation.run.setdefault(f"{TRAINER}.optimizer.schedule", "linear")  # transformers' own
    first, second = translation.get("adam_beta1", 0.9), translation.get("adam_beta2", 0.999)
    if translation.has("adam_beta1", "adam_beta2"):
        translation.set(f"{TRAINER}.optimizer.betas", [float(first), float(second)])
    translation.convert_warmup("warmup_ratio")


def _set_intervals(translation: ForeignTranslation) -> None:
    for strategy, ours in {"eval_strategy": "runtime.eval_every", "save_strategy": "runtime.save_every"}.items():
        value = translation.get(strategy)
        if value == "no":
            translation.run.pop(ours, None)
        elif value == "epoch":
            translation.refuse(strategy, f"set {ours} in steps")


def _set_policy_loss(translation: ForeignTranslation, trainer: str) -> None:
    kind = translation.get("loss_type", "dapo")
    low = float(translation.get("epsilon", 0.2))
    high = float(translation.get("epsilon_high", low))
    algorithm = kind if kind in ("cispo", "sapo") else TRAINERS[trainer]
    if translation.get("importance_sampling_level", "token") == "sequence":
        algorithm = "gspo"
    translation.set("algorithm", algorithm)
    if algorithm == "cispo":
        translation.set("loss.clip_high", high - 1.0 if high > 1.0 else None)
    elif algorithm != "sapo":
        translation.set("loss.clip_low", low)
        translation.set("loss.clip_high", high)
    if kind in _AGGREGATIONS and trainer == "grpo":
        mean = _AGGREGATIONS[kind]
        translation.set("loss.aggregation", "sequence_mean_token_mean" if algorithm == "gspo" else mean)
        if mean == "constant" and algorithm != "gspo":
            translation.set("loss.constant_length", translation.run[f"{POLICY}.sampling.max_new_tokens"])
    elif kind not in ("cispo", "sapo"):
        translation.refuse("loss_type", "no such mean here; see `loss.aggregation` in docs/algorithms.md")
    if dual := translation.get("delta"):
        translation.set("loss.dual_clip", float(dual))
    beta = float(translation.get("beta", 0.0 if trainer == "grpo" else 0.05))
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
    model = translation.get("reward_model_name_or_path")
    parts: list[dict[str, Any]] = []
    for name in list_values(names) if names else []:
        if name in _REWARDS:
            parts.append({"fn": _REWARDS[name]})
            continue
        parts.append({"fn": f"<a function that calls {name}>"})
        translation.notes.append(
            f'reward: {name} has TRL\'s signature; wrap it as docs/writing_a_reward.md, "From another library", shows'
        )
    if model:
        translation.set("models.reward", {"module": "fsdp", "load": model, "head": "reward", "frozen": True})
        parts.append({"model": "reward"})
    for part, weight in zip(parts, list_values(weights) if weights else [], strict=False):
        part["weight"] = float(weight)
    translation.set("reward", parts or None)


def _set_rollout(translation: ForeignTranslation) -> None:
    uses, corrects = translation.get("use_vllm", False), translation.get("vllm_importance_sampling_correction", True)
    mode = translation.get("vllm_importance_sampling_mode", "sequence_mask")
    cap = translation.get("vllm_importance_sampling_cap", 3.0)
    if translation.get("vllm_mode") == "server":
        translation.notes.append("models.policy: TRL's vLLM server is a process of the run here (docs/placement.md)")
    if not uses:
        return
    translation.set(f"{POLICY}.module", "vllm")
    if corrects and mode in _CORRECTIONS:
        level, bound = _CORRECTIONS[mode]
        translation.set("loss.is_level", level)
        translation.set("loss.is_mode", bound)
        translation.set("loss.is_high", float(cap))


def _set_offline_loss(translation: ForeignTranslation, trainer: str) -> None:
    beta, smoothing = translation.get("beta"), translation.get("label_smoothing")
    kinds = list_values(translation.get("loss_type", "sigmoid" if trainer == "dpo" else trainer))
    if trainer == "dpo":
        kind = str(kinds[0])
        translation.set("loss.fn", kind if kind in _PAIRWISE else "dpo")
        if kind not in (*_PAIRWISE, "sigmoid", "robust", "sigmoid_norm") or len(kinds) > 1:
            translation.refuse("loss_type", "see the table of names in docs/writing_a_loss.md")
        translation.set("loss.robust", True if kind == "robust" else None)
        translation.set("loss.length_normalised", True if kind == "sigmoid_norm" else None)
        if smoothing and translation.run["loss.fn"] == "dpo":
            translation.set("loss.label_smoothing", float(smoothing))
    if trainer in ("dpo", "kto"):
        translation.set("loss.beta", float(beta if beta is not None else 0.1))
        translation.set("models.reference.load", translation.get("ref_model"))
    if trainer == "kto":
        for name in ("desirable_weight", "undesirable_weight"):
            value = translation.get(name)
            translation.set(f"loss.{name}", None if value is None else float(value))
    if trainer == "reward" and (centre := translation.get("center_rewards_coefficient")):
        translation.set("loss.centre_coef", float(centre))


def _set_adapter(translation: ForeignTranslation) -> None:
    if not translation.get("use_peft", False):
        return
    translation.given.setdefault("lora_r", 16)
    translation.given.setdefault("lora_alpha", 32)
    set_adapter(translation, "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")
    for name, ours in {"use_rslora": "rslora", "use_dora": "dora"}.items():
        translation.set(f"{TRAINER}.lora.{ours}", translation.get(name) or None)
    if translation.get("load_in_4bit", False):
        translation.set(f"{TRAINER}.lora.base_bits", 4)
