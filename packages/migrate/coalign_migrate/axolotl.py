"""Axolotl: its keys over TRL's arguments, which it passes on."""

from __future__ import annotations

from typing import Any

from coalign_migrate.keys.foreign_keys import KERNELS, LOGGED, PACKED, SAMPLING, TRAINER, ForeignKeys
from coalign_migrate.keys.trl import TRL
from coalign_migrate.translation import ForeignTranslation, list_values, name_data
from coalign_migrate.trl import find_main, set_trainer

_TRAINERS = {"dpo": "dpo", "ipo": "dpo", "kto": "kto", "orpo": "orpo", "simpo": "cpo", "grpo": "grpo"}
_INSTRUCTIONS = {"prompt": "instruction", "answer": "output"}

AXOLOTL = ForeignKeys(
    "Axolotl",
    inputs=("`base_model`", "`datasets`"),
    same={
        **TRL.same,
        "tokenizer_config": "models.NAME.tokenizer",
        "context_parallel_size": f"{TRAINER}.context_parallel",
        "tensor_parallel_size": f"{TRAINER}.tensor_parallel",
        "expert_parallel_size": f"{TRAINER}.expert_parallel",
        "dp_replicate_size": f"{TRAINER}.dp_replicate",
        "torch_compile": f"{TRAINER}.compile",
    },
    combined={
        **TRL.combined,
        "rl": "algorithm",
        "reward_model": "algorithm: reward_model",
        "process_reward_model": "algorithm: process_reward",
        "pretraining_dataset": "data.train",
        "test_datasets": "data.eval",
        "adapter": f"{TRAINER}.lora",
        "lora_target_linear": f"{TRAINER}.lora.target",
        "chat_template": "data.chat_template",
        "train_on_inputs": "data.train_on",
        "cosine_min_lr_ratio": f"{TRAINER}.optimizer.min_lr_ratio",
        "wandb_project": "runtime.trackers[].project",
        "wandb_name": "runtime.trackers[].run",
        "use_tensorboard": "runtime.trackers",
        "use_mlflow": "runtime.trackers",
    },
    unneeded={
        **TRL.unneeded,
        "*sample_packing*": PACKED,
        "pad_to_sequence_len": PACKED,
        "group_by_length": PACKED,
        "dataset_prepared_path": "rows are tokenised before the first step",
        "dataset_processes": "rows are tokenised before the first step",
        "liger_*": KERNELS,
        "lora_*_kernel": KERNELS,
        "use_*kernel*": KERNELS,
        "use_scattermoe": KERNELS,
        "use_sonicmoe": KERNELS,
        "cut_cross_entropy": KERNELS,
        "flash_*": KERNELS,
        "sdp_attention": KERNELS,
        "xformers_attention": KERNELS,
        "plugins": KERNELS,
        "model_type": "config.json of the model says it",
        "tokenizer_type": "config.json of the model says it",
        "processor_type": "config.json of the model says it",
        "strict": "unknown keys are errors",
        "dp_shard_size": "weights are sharded over all processes",
        "wandb_*": "trackers read their own variables",
        "load_in_8bit": "frozen weights are kept in 4 bits (models.trainer.lora.base_bits) or as they are",
        "debug": LOGGED,
    },
    defaults={
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "num_train_epochs": 1.0,
        "lr_scheduler_type": "cosine",
    },
    renamed={
        **TRL.renamed,
        "base_model": "model_name_or_path",
        "sequence_len": "max_length",
        "micro_batch_size": "per_device_train_batch_size",
        "num_epochs": "num_train_epochs",
        "lr_scheduler": "lr_scheduler_type",
        "optimizer": "optim",
        "rl_beta": "beta",
        "dpo_beta": "beta",
        "orpo_alpha": "beta",
        "kto_desirable_weight": "desirable_weight",
        "kto_undesirable_weight": "undesirable_weight",
        "peft_use_rslora": "use_rslora",
        "peft_use_dora": "use_dora",
        "lora_model_dir": "lora_load",
        "lora_target_modules": "lora_target_modules",
        "trl.*": "*",
    },
)


def translate_axolotl(values: dict[str, Any]) -> ForeignTranslation:
    """Translate the keys of `axolotl train`. ValueError for what has no recipe here."""
    method = values.get("rl")
    if method and method not in _TRAINERS:
        raise ValueError(f"Axolotl's `rl: {method}` has no recipe here; there are recipes for {', '.join(_TRAINERS)}")
    trainer = _TRAINERS[method] if method else "reward" if values.get("reward_model") else "sft"
    trainer = "prm" if values.get("process_reward_model") else trainer
    nested = {f"trl.{name}": value for name, value in (values.get("trl") or {}).items()}
    translation = ForeignTranslation(
        AXOLOTL, {name: value for name, value in values.items() if name != "trl"} | nested, main=find_main(trainer)
    )
    for key in ("rl", "reward_model", "process_reward_model"):
        translation.get(key)
    if method in ("ipo", "simpo"):
        translation.given["loss_type"] = method
    _set_adapter(translation)
    _set_precision(translation)
    translation.copy_same()
    translation.set(f"models.{translation.main}.load", translation.get("model_name_or_path"))
    _set_trackers(translation)
    _set_intervals(translation)
    is_text = _set_data(translation)
    set_trainer(translation, trainer)
    if trainer == "grpo":
        translation.run.pop("data.max_tokens", None)
        translation.run.setdefault(f"{SAMPLING}.max_new_tokens", 256)
    if is_text and trainer == "sft":
        translation.set("algorithm", "pretrain")
        translation.run.pop("data.train_on", None)
    least = translation.get("cosine_min_lr_ratio")
    translation.set(f"{TRAINER}.optimizer.min_lr_ratio", None if least is None else float(least))
    return translation


def _set_adapter(translation: ForeignTranslation) -> None:
    """Set the adapters' keys as TRL names them."""
    adapter = translation.get("adapter")
    if adapter not in (None, "lora", "qlora"):
        raise ValueError(f"Axolotl's `adapter: {adapter}` has no counterpart here; lora and qlora have")
    linear = translation.get("lora_target_linear", False)
    if adapter:
        translation.given["use_peft"] = True
        translation.given.setdefault("lora_r", 8)
        translation.given.setdefault("lora_alpha", 16)
        if linear:
            translation.given["lora_target_modules"] = "all-linear"
        translation.given["load_in_4bit"] = adapter == "qlora"


def _set_precision(translation: ForeignTranslation) -> None:
    half = translation.get("bf16", "auto")
    translation.given["bf16"] = half in ("auto", True, "full")
    if translation.given.get("fp16") in (None, False, "auto"):
        translation.given.pop("fp16", None)


def _set_trackers(translation: ForeignTranslation) -> None:
    names = {"project": translation.get_text("wandb_project"), "run": translation.get_text("wandb_name")}
    names = {name: value for name, value in names.items() if value}
    trackers: list[Any] = [{"name": "wandb", **names}] if "project" in names else []
    trackers += [name for name in ("tensorboard", "mlflow") if translation.get(f"use_{name}", False)]
    translation.set("runtime.trackers", trackers or None)


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
