"""Axolotl: what several of its keys decide together."""

from __future__ import annotations

from typing import Any

from coalign_migrate.keys.foreign_keys import SAMPLING, TRAINER, load_keys
from coalign_migrate.translation import ForeignTranslation, list_values, look_up, name_data, set_trackers
from coalign_migrate.trl import find_main, set_trainer

_TRAINERS = {"dpo": "dpo", "ipo": "dpo", "kto": "kto", "orpo": "orpo", "simpo": "cpo", "grpo": "grpo"}
_INSTRUCTIONS = {"prompt": "instruction", "answer": "output"}


def translate_axolotl(values: dict[str, Any]) -> ForeignTranslation:
    """Translate the keys of `axolotl train`. ValueError for what has no recipe here."""
    method = values.get("rl")
    trainer = "reward" if values.get("reward_model") else "sft"
    if method:
        trainer = look_up(_TRAINERS, method, f"Axolotl's `rl: {method}`")
    trainer = "prm" if values.get("process_reward_model") else trainer
    nested = {f"trl.{name}": value for name, value in (values.get("trl") or {}).items()}
    values = {name: value for name, value in values.items() if name != "trl"} | nested
    translation = ForeignTranslation(load_keys("axolotl"), values, main=find_main(trainer))
    for key in ("rl", "reward_model", "process_reward_model"):
        translation.get(key)
    if method in ("ipo", "simpo"):
        translation.given["loss_type"] = method
    _set_adapter(translation)
    translation.given["bf16"] = translation.get("bf16", "auto") in ("auto", True, "full")
    if translation.given.get("fp16") in (None, False, "auto"):
        translation.given.pop("fp16", None)
    translation.copy_same()
    used = {"wandb": "wandb_project", "tensorboard": "use_tensorboard", "mlflow": "use_mlflow"}
    set_trackers(translation, "wandb_project", "wandb_name", used)
    _set_intervals(translation)
    is_text = _set_data(translation)
    set_trainer(translation, trainer)
    if trainer == "grpo":
        translation.drop("data.max_tokens")
        translation.run.setdefault(f"{SAMPLING}.max_new_tokens", 256)
    if is_text and trainer == "sft":
        translation.set("algorithm", "pretrain")
        translation.drop("data.train_on")
    translation.set(f"{TRAINER}.optimizer.min_lr_ratio", translation.number("cosine_min_lr_ratio"))
    return translation


def _set_adapter(translation: ForeignTranslation) -> None:
    """Set the adapters' keys as TRL names them."""
    adapter = translation.get("adapter")
    if adapter not in (None, "lora", "qlora"):
        raise ValueError(f"Axolotl's `adapter: {adapter}` has no counterpart here; lora and qlora have")
    linear = translation.get("lora_target_linear", False)
    if adapter:
        translation.presume(use_peft=True, lora_r=8, lora_alpha=16)
        if linear:
            translation.given["lora_target_modules"] = "all-linear"
        translation.given["load_in_4bit"] = adapter == "qlora"


def _set_intervals(translation: ForeignTranslation) -> None:
    for name, ours in {"evals_per_epoch": "runtime.eval_every", "saves_per_epoch": "runtime.save_every"}.items():
        translation.refuse(name, f"set {ours} in steps")
    translation.refuse("val_set_size", "data.eval takes rows of their own")
    template = translation.get("chat_template")
    if template not in (None, "tokenizer_default"):
        translation.refuse("chat_template", "data.chat_template is the tokenizer's own, or a Jinja file")
    inputs = translation.get("train_on_inputs")
    translation.set("data.train_on", "all" if inputs else None)


def _set_data(translation: ForeignTranslation) -> bool:
    """Set the rows; return whether they are texts without turns."""
    texts = translation.get("pretraining_dataset")
    rows, evaluated = translation.get("datasets"), translation.get("test_datasets")
    row_types: list[str] = []
    for items, ours in ((texts or rows, "data.train"), (evaluated, "data.eval")):
        items = [items] if isinstance(items, str | dict) else items or []
        sources = [_name_source(translation, item if isinstance(item, dict) else {"path": item}) for item in items]
        translation.set(ours, sources or None)
        if ours == "data.train":
            row_types = [str(item.get("type")) if isinstance(item, dict) else "completion" for item in items]
    return bool(texts) or (bool(row_types) and all(row_type == "completion" for row_type in row_types))


def _name_source(translation: ForeignTranslation, item: dict[str, Any]) -> dict[str, Any]:
    """Return a source of ours: a file or the hub's name, and what its columns are called."""
    files, row_type = item.get("data_files"), str(item.get("type", ""))
    path = (
        str(list_values(files)[0])
        if files
        else name_data(item.get("path"), item.get("split", "train"), item.get("name"))
    )
    keys: dict[str, str] = {}
    if row_type.startswith("alpaca"):
        keys = _INSTRUCTIONS
        translation.notes.append(f"data: the column `input` of {path} is not read; see docs/data.md for prompts of two")
    elif row_type == "completion" or not row_type:
        keys = {"text": str(item["field"])} if item.get("field") else {}
    turns = "prompt" if translation.given.get("rl") in ("dpo", "ipo", "orpo", "simpo") else "messages"
    for theirs, ours in {"field_messages": turns, "field_chosen": "chosen", "field_rejected": "rejected"}.items():
        if item.get(theirs) and item[theirs] != ours:
            keys[ours] = str(item[theirs])
    taken = {"path", "type", "split", "name", "data_files", "ds_type", "field", "message_property_mappings", "roles"}
    if rest := sorted(set(item) - taken - {"field_messages", "field_chosen", "field_rejected"}):
        translation.notes.append(f"data: of {path} these settings are not translated: {', '.join(rest)}")
    if row_type and not row_type.startswith(("alpaca", "chat_template", "completion", "sharegpt")):
        translation.notes.append(
            f"data: rows of {path} are of Axolotl's type {row_type}; docs/data.md has the forms of rows"
        )
    return {"path": path, **({"keys": dict(keys)} if keys else {})}
