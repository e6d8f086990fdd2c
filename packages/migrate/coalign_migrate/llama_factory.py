"""LLaMA-Factory: what several of its arguments decide together, and its data sets by dataset_info.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coalign_migrate.keys.foreign_keys import load_keys
from coalign_migrate.translation import ForeignTranslation, list_values, name_data, set_vision
from coalign_migrate.trl import find_main, set_trainer

_STAGES = {"pt": "sft", "sft": "sft", "rm": "reward", "dpo": "dpo", "kto": "kto", "ppo": "ppo"}
_PREFERENCES = {"sigmoid": "dpo", "ipo": "dpo", "hinge": "dpo", "orpo": "orpo", "simpo": "cpo"}
_COLUMNS = {"prompt": "prompt", "response": "answer", "messages": "messages", "chosen": "chosen"}
_COLUMNS |= {"rejected": "rejected", "images": "images", "kto_tag": "label", "tools": "tools"}
_ALPACA = {"prompt": "instruction", "response": "output"}


def translate_llama_factory(values: dict[str, Any], folder: Path) -> ForeignTranslation:
    """Translate the arguments of `llamafactory-cli train`. ValueError for what has no recipe here."""
    stage, loss = values.get("stage", "sft"), values.get("pref_loss", "sigmoid")
    if stage not in _STAGES or values.get("do_train") is False:
        raise ValueError(f"LLaMA-Factory's stage {stage} without training has no recipe here")
    if stage == "dpo" and loss not in _PREFERENCES:
        raise ValueError(f"pref_loss {loss} has no loss here; there are {', '.join(_PREFERENCES)}")
    trainer = _PREFERENCES[loss] if stage == "dpo" else _STAGES[stage]
    translation = ForeignTranslation(load_keys("llama_factory"), values, main=find_main(trainer))
    for key in ("stage", "pref_loss"):
        translation.get(key)
    if stage == "dpo":
        translation.given |= {"loss_type": loss} | ({"cpo_alpha": 0.0} if loss == "simpo" else {})
    _set_adapter(translation)
    translation.copy_same()
    _set_data(translation, stage, folder)
    set_trainer(translation, trainer)
    set_vision(translation, *(f"freeze_{name}" for name in ("vision_tower", "multi_modal_projector", "language_model")))
    if stage == "pt":
        translation.set("algorithm", "pretrain")
        translation.drop("data.train_on")
    translation.set("loss.nll_coef", translation.number("pref_ftx") or None)
    return translation


def _set_adapter(translation: ForeignTranslation) -> None:
    """Say of adapters what TRL says of them. ValueError for weights that are frozen in part."""
    tuning, bits = translation.get("finetuning_type"), translation.get("quantization_bit")
    if tuning not in ("lora", "full"):
        raise ValueError(f"finetuning_type {tuning} has no counterpart here; lora and full have")
    if tuning == "full":
        return
    rank = translation.get("lora_r")
    translation.presume(use_peft=True, lora_r=rank, lora_alpha=rank * 2)
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
