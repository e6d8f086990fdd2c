"""LLaMA-Factory: its arguments over TRL's, and its data sets by dataset_info.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coalign_migrate.keys.foreign_keys import PACKED, TRAINER, ForeignKeys
from coalign_migrate.keys.trl import TRL
from coalign_migrate.translation import ForeignTranslation, list_values, name_data
from coalign_migrate.trl import find_main, set_trainer

_STAGES = {"pt": "sft", "sft": "sft", "rm": "reward", "dpo": "dpo", "kto": "kto", "ppo": "ppo"}
_PREFERENCES = {"sigmoid": "dpo", "ipo": "dpo", "hinge": "dpo", "orpo": "orpo", "simpo": "cpo"}
_COLUMNS = {"prompt": "prompt", "response": "answer", "messages": "messages", "chosen": "chosen"}
_COLUMNS |= {"rejected": "rejected", "images": "images", "kto_tag": "label", "tools": "tools"}
_ALPACA = {"prompt": "instruction", "response": "output"}

LLAMA_FACTORY = ForeignKeys(
    "LLaMA-Factory",
    inputs=("`model_name_or_path`", "`dataset`"),
    same={**TRL.same, "default_system": "data.system"},
    combined={
        **TRL.combined,
        "stage": "algorithm",
        "finetuning_type": f"{TRAINER}.lora",
        "dataset": "data.train",
        "dataset_dir": "data.train",
        "max_samples": "data.train[].max_samples",
        "eval_dataset": "data.eval",
        "pref_loss": "algorithm and loss.fn",
        "pref_ftx": "loss.nll_coef",
        "quantization_bit": f"{TRAINER}.lora.base_bits",
        "train_on_prompt": "data.train_on",
        "mask_history": "data.train_on",
        "enable_thinking": "data.chat_template_kwargs",
        "freeze_vision_tower": f"{TRAINER}.vision.tower",
        "freeze_multi_modal_projector": f"{TRAINER}.vision.projector",
        "freeze_language_model": f"{TRAINER}.vision.language",
    },
    unneeded={
        **TRL.unneeded,
        "template": "the model's own chat template is taken (data.chat_template)",
        "flash_attn": "the fastest attention that the machine has is taken (models.NAME.attention)",
        "preprocessing_*": "rows are tokenised before the first step",
        "overwrite_cache": "rows are tokenised before the first step",
        "plot_loss": "plots are in the run folder",
        "neat_packing": PACKED,
        "quantization_method": "NF4, where models.trainer.lora.base_bits is set",
        "double_quantization": "NF4, where models.trainer.lora.base_bits is set",
        "use_reentrant_gc": "checkpointing is never re-entrant",
        "include_num_input_tokens_seen": "tokens are always counted",
    },
    defaults={
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "num_train_epochs": 3.0,
        "learning_rate": 5e-5,
        "max_length": 2048,
        "finetuning_type": "lora",
        "lora_r": 8,
        "lora_target_modules": "all",
    },
    renamed={
        **TRL.renamed,
        "cutoff_len": "max_length",
        "lora_rank": "lora_r",
        "lora_target": "lora_target_modules",
        "pref_beta": "beta",
        "dpo_label_smoothing": "label_smoothing",
        "kto_chosen_weight": "desirable_weight",
        "kto_rejected_weight": "undesirable_weight",
        "reward_model": "reward_model_name_or_path",
        "max_new_tokens": "response_length",
    },
)


def translate_llama_factory(values: dict[str, Any], folder: Path) -> ForeignTranslation:
    """Translate the arguments of `llamafactory-cli train`. ValueError for what has no recipe here."""
    stage, loss = values.get("stage", "sft"), values.get("pref_loss", "sigmoid")
    if stage not in _STAGES or values.get("do_train") is False:
        raise ValueError(f"LLaMA-Factory's stage {stage} without training has no recipe here")
    if stage == "dpo" and loss not in _PREFERENCES:
        raise ValueError(f"pref_loss {loss} has no loss here; there are {', '.join(_PREFERENCES)}")
    trainer = _PREFERENCES[loss] if stage == "dpo" else _STAGES[stage]
    translation = ForeignTranslation(LLAMA_FACTORY, values, main=find_main(trainer))
    _choose_loss(translation, stage, loss)
    _set_adapter(translation)
    translation.copy_same()
    translation.set(f"models.{translation.main}.load", translation.get("model_name_or_path"))
    _set_data(translation, stage, folder)
    set_trainer(translation, trainer)
    _set_components(translation)
    if stage == "pt":
        translation.set("algorithm", "pretrain")
        translation.run.pop("data.train_on", None)
    if nll := translation.get("pref_ftx"):
        translation.set("loss.nll_coef", float(nll))
    return translation


def _choose_loss(translation: ForeignTranslation, stage: str, loss: str) -> None:
    translation.get("stage")
    translation.get("pref_loss")
    if stage == "dpo":
        translation.given["loss_type"] = loss
        if loss == "simpo":
            translation.given["cpo_alpha"] = 0.0


def _set_adapter(translation: ForeignTranslation) -> None:
    """Say of adapters what TRL says of them. ValueError for weights that are frozen in part."""
    tuning, bits = translation.get("finetuning_type"), translation.get("quantization_bit")
    if tuning not in ("lora", "full"):
        raise ValueError(f"finetuning_type {tuning} has no counterpart here; lora and full have")
    if tuning == "full":
        return
    rank = translation.get("lora_r")
    given = {"use_peft": True, "lora_r": rank, "lora_alpha": rank * 2}
    for name, value in given.items():
        translation.given.setdefault(name, value)
    targets = translation.get("lora_target_modules")
    translation.given["lora_target_modules"] = "all-linear" if targets == "all" else targets
    if bits == 4:
        translation.given["load_in_4bit"] = True
    elif bits:
        translation.refuse("quantization_bit", "frozen weights are kept in 4 bits or as they are")


def _set_data(translation: ForeignTranslation, stage: str, folder: Path) -> None:
    max_rows, dataset_dir = translation.get("max_samples"), translation.get("dataset_dir", "data")
    entries = _read_info(str(dataset_dir), folder)
    for key, ours in {"dataset": "data.train", "eval_dataset": "data.eval"}.items():
        names = translation.get(key)
        sources = [_name_source(translation, name, entries) for name in list_values(names)] if names else []
        for source in sources:
            source |= {"max_samples": max_rows} if max_rows and ours == "data.train" else {}
            if stage == "pt":
                source["keys"] = {"text": source.get("keys", {}).get("prompt", "text")}
        translation.set(ours, sources or None)
    history, prompts = translation.get("mask_history", False), translation.get("train_on_prompt", False)
    if stage == "sft":
        translation.set("data.train_on", "last" if history else "all" if prompts else None)
    thinking = translation.get("enable_thinking")
    translation.set("data.chat_template_kwargs", None if thinking is None else {"enable_thinking": thinking})
    translation.notes.append("data: LLaMA-Factory cuts rows of more than cutoff_len tokens, and Coalign drops them")


def _read_info(name: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the folder of data, and what its dataset_info.json says: beside the file, above it, or from here."""
    for base in (*(folder / "x").resolve().parents, Path()):
        for candidate in (base / name, base):
            if (file := candidate / "dataset_info.json").is_file():
                info = json.loads(file.read_text(encoding="utf-8"))
                return candidate, info if isinstance(info, dict) else {}
    return Path(name), {}


def _name_source(translation: ForeignTranslation, name: str, entries: tuple[Path, dict[str, Any]]) -> dict[str, Any]:
    """Return a source for the name of a data set: its file or the hub's name, and its columns."""
    folder, info = entries
    entry = info.get(name)
    if not isinstance(entry, dict):
        return {"path": f"<the file of {name} in dataset_info.json>"}
    path = str(folder / str(entry.get("file_name", "")))
    if hub := entry.get("hf_hub_url"):
        path = name_data(hub, entry.get("split", "train"), entry.get("subset"))
    shared = entry.get("formatting", "alpaca") == "sharegpt"
    columns = ({"messages": "conversations"} if shared else _ALPACA) | entry.get("columns", {})
    if entry.get("ranking") and not shared:
        columns.pop("response", None)
    keys = {_COLUMNS[column]: row for column, row in columns.items() if column in _COLUMNS}
    if entry.get("ranking") and shared:  # the turns before the two answers
        keys["prompt"] = keys.pop("messages")
    if rest := sorted(set(columns) - set(_COLUMNS)) + ([] if shared else ["query"]):
        translation.notes.append(f"data: of {name}'s columns these are not read: {', '.join(dict.fromkeys(rest))}")
    keys = {ours: row for ours, row in keys.items() if ours != row}
    return {"path": path, **({"keys": keys} if keys else {})}


def _set_components(translation: ForeignTranslation) -> None:
    """Set which components of a vision-language model learn."""
    components = {"vision_tower": "tower", "multi_modal_projector": "projector", "language_model": "language"}
    for theirs, ours in components.items():
        if translation.get(f"freeze_{theirs}") is True:
            translation.set(f"{TRAINER}.vision.{ours}", "freeze")
