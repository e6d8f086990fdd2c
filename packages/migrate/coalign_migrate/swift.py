"""ms-swift: what several of its arguments decide together, those of its Megatron programs included."""

from __future__ import annotations

from typing import Any

from coalign_migrate.keys.foreign_keys import TRAINER, load_keys
from coalign_migrate.translation import ForeignTranslation, list_values, name_data, set_least_rate, set_vision
from coalign_migrate.trl import find_main, set_trainer

_TRAINERS = {"dpo": "dpo", "kto": "kto", "orpo": "orpo", "cpo": "cpo", "simpo": "cpo", "rm": "reward"}
_TRAINERS |= {"grpo": "grpo", "ppo": "ppo"}


def translate_swift(program: str, values: dict[str, Any]) -> ForeignTranslation:
    """Translate the arguments of `swift sft`, `pt` or `rlhf`, and of `megatron sft` and so on."""
    engine, _, verb = program.rpartition(" ")
    verb = "sample" if "sampler_type" in values else verb
    rlhf_type = values.get("rlhf_type") or ("dpo" if verb == "rlhf" else None)
    if verb not in ("sft", "pt", "rlhf", "None") or (rlhf_type and rlhf_type not in _TRAINERS):
        methods = ", ".join(_TRAINERS)
        what = f"rlhf_type {rlhf_type}" if rlhf_type else f"program {program}"
        raise ValueError(f"ms-swift's {what} has no recipe here; there are sft, pt, and rlhf for {methods}")
    trainer = _TRAINERS[rlhf_type] if rlhf_type else "sft"
    translation = ForeignTranslation(load_keys("swift"), values, main=find_main(trainer))
    translation.get("rlhf_type")
    if rlhf_type == "simpo":
        translation.given["loss_type"] = "simpo"
    is_full = _set_adapter(translation)
    translation.set(f"{TRAINER}.optimizer.lr", 1e-5 if is_full else 1e-4)
    translation.copy_same()
    _set_data(translation, verb)
    set_trainer(translation, trainer)
    if engine == "megatron":
        translation.set(f"{TRAINER}.module", "megatron")
    _set_rest(translation, trainer)
    if verb == "pt":
        translation.set("algorithm", "pretrain")
        translation.drop("data.train_on")
    return translation


def _set_adapter(translation: ForeignTranslation) -> bool:
    """Set the adapters' keys as TRL names them. Return whether all weights are trained."""
    tuning, bits = translation.get("tuner_type"), translation.get("quant_bits")
    if tuning not in ("lora", "full"):
        raise ValueError(f"ms-swift's tuner_type {tuning} has no counterpart here; lora and full have")
    if tuning == "lora":
        translation.presume(use_peft=True, lora_r=8, lora_alpha=32, lora_dropout=0.05)
        if bits == 4:
            translation.given["load_in_4bit"] = True
        elif bits:
            translation.refuse("quant_bits", "frozen weights are kept in 4 bits or as they are")
    return tuning == "full"


def _set_data(translation: ForeignTranslation, verb: str) -> None:
    for key, ours in {"dataset": "data.train", "val_dataset": "data.eval"}.items():
        names = translation.get(key)
        translation.set(ours, [_name_source(str(name)) for name in list_values(names)] if names else None)
    thinking = translation.get("enable_thinking")
    translation.set("data.chat_template_kwargs", None if thinking is None else {"enable_thinking": thinking})
    translation.refuse("split_dataset_ratio", "data.eval takes rows of their own")


def _name_source(text: str) -> dict[str, Any]:
    """Return a source for `org/name:subset#500`, or for a file."""
    name, _, max_rows = text.partition("#")
    path, _, subset = name.removeprefix("HF::").removeprefix("MS::").partition(":")
    source: dict[str, Any] = {"path": name_data(path, "train", subset or None)}
    return source | ({"max_samples": int(max_rows)} if max_rows.isdigit() else {})


def _set_rest(translation: ForeignTranslation, trainer: str) -> None:
    """Set what only ms-swift has: sizes and rates as Megatron counts them, filters, frozen parts."""
    rows, samples = translation.get("global_batch_size"), translation.run.get("runtime.samples_per_prompt", 1)
    steps = translation.get("steps_per_generation", 1) if rows else 1
    if rows:
        translation.set("runtime.prompts_per_step", max(1, rows * steps // samples if trainer == "grpo" else rows))
        translation.notes = [note for note in translation.notes if "is for one process" not in note]
    set_least_rate(translation, "min_lr")
    if translation.get("dynamic_sample", False):
        translation.set("filter.fn", "varied")
    nll = translation.number("rpo_alpha")
    translation.set("loss.nll_coef", nll or None if trainer == "dpo" else None)
    set_vision(translation, "freeze_vit", "freeze_aligner", "freeze_llm")
