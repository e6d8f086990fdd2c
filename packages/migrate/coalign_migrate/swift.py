"""ms-swift: its arguments over TRL's, those of its Megatron programs included."""

from __future__ import annotations

from typing import Any

from coalign_migrate.keys.foreign_keys import KERNELS, MEMORY, MICRO, PACKED, TRAINER, ForeignKeys
from coalign_migrate.keys.trl import TRL
from coalign_migrate.translation import ForeignTranslation, list_values, name_data
from coalign_migrate.trl import find_main, set_trainer

_TRAINERS = {"dpo": "dpo", "kto": "kto", "orpo": "orpo", "cpo": "cpo", "simpo": "cpo", "rm": "reward"}
_TRAINERS |= {"grpo": "grpo", "ppo": "ppo"}

SWIFT = ForeignKeys(
    "ms-swift",
    inputs=("`model`", "`dataset`"),
    same={
        **TRL.same,
        "system": "data.system",
        "sequence_parallel_size": f"{TRAINER}.context_parallel",
        "context_parallel_size": f"{TRAINER}.context_parallel",
        "tensor_model_parallel_size": f"{TRAINER}.tensor_parallel",
        "pipeline_model_parallel_size": f"{TRAINER}.pipeline_parallel",
        "expert_model_parallel_size": f"{TRAINER}.expert_parallel",
        "expert_tensor_parallel_size": f"{TRAINER}.megatron.expert_tensor_parallel",
        "router_aux_loss_coef": f"{TRAINER}.router_aux_loss_coef",
    },
    combined={
        **TRL.combined,
        "rlhf_type": "algorithm",
        "dataset": "data.train",
        "val_dataset": "data.eval",
        "tuner_type": f"{TRAINER}.lora",
        "global_batch_size": "runtime.prompts_per_step",
        "min_lr": f"{TRAINER}.optimizer.min_lr_ratio",
        "quant_bits": f"{TRAINER}.lora.base_bits",
        "rpo_alpha": "loss.nll_coef",
        "enable_thinking": "data.chat_template_kwargs",
        "dynamic_sample": "filter",
        "recompute_granularity": f"{TRAINER}.activation_checkpointing",
        "freeze_vit": f"{TRAINER}.vision.tower",
        "freeze_aligner": f"{TRAINER}.vision.projector",
        "freeze_llm": f"{TRAINER}.vision.language",
    },
    unneeded={
        **TRL.unneeded,
        "micro_batch_size": MICRO,
        "padding_free": PACKED,
        "group_by_length": PACKED,
        "sequence_parallel": PACKED,
        "load_from_cache_file": "rows are tokenised before the first step",
        "no_save_*": "checkpoints are always complete",
        "finetune": "weights are those of the model",
        "attn_impl": "the fastest attention that the machine has is taken (models.NAME.attention)",
        "attention_backend": "the fastest attention that the machine has is taken (models.NAME.attention)",
        "recompute_*": "models.trainer.activation_checkpointing recomputes whole layers",
        "*fusion": KERNELS,
        "moe_grouped_gemm": KERNELS,
        "moe_*_overlap": KERNELS,
        "use_precision_aware_optimizer": MEMORY,
        "optimizer_*offload*": MEMORY,
        "offload_*": MEMORY,
        "move_model_batches": MEMORY,
        "sleep_level": MEMORY,
        "vit_gradient_checkpointing": MEMORY,
        "model_author": "rows say what the model answers of itself",
        "model_name": "rows say what the model answers of itself",
        "use_hf": "names are those of the Hugging Face hub",
        "create_checkpoint_symlink": "the model is in the run folder (`output`/model)",
        "merge_lora": "the model is in the run folder (`output`/model)",
        "ENV": "processes have the environment of the command",
    },
    defaults={
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "num_train_epochs": 3.0,
        "lr_scheduler_type": "cosine",
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "tuner_type": "lora",
    },
    renamed={
        **TRL.renamed,
        "model": "model_name_or_path",
        "train_type": "tuner_type",
        "sft_type": "tuner_type",
        "lora_rank": "lora_r",
        "target_modules": "lora_target_modules",
        "lr": "learning_rate",
        "lr_decay_style": "lr_scheduler_type",
        "lr_warmup_fraction": "warmup_ratio",
        "lr_warmup_iters": "warmup_steps",
        "train_iters": "max_steps",
        "max_epochs": "num_train_epochs",
        "save": "output_dir",
        "save_interval": "save_steps",
        "eval_interval": "eval_steps",
        "clip_grad": "max_grad_norm",
        "moe_aux_loss_coeff": "router_aux_loss_coef",
        "overlong_filter": "mask_truncated_completions",
        "reward_model": "reward_model_name_or_path",
    },
)


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
    translation = ForeignTranslation(SWIFT, values, main=find_main(trainer))
    translation.get("rlhf_type")
    if rlhf_type == "simpo":
        translation.given["loss_type"] = "simpo"
    is_full = _set_adapter(translation)
    translation.set(f"{TRAINER}.optimizer.lr", 1e-5 if is_full else 1e-4)
    translation.copy_same()
    translation.set(f"models.{translation.main}.load", translation.get("model_name_or_path"))
    _set_data(translation, verb)
    set_trainer(translation, trainer)
    if engine == "megatron":
        translation.set(f"{TRAINER}.module", "megatron")
    _set_rest(translation, trainer)
    if verb == "pt":
        translation.set("algorithm", "pretrain")
        translation.run.pop("data.train_on", None)
    return translation


def _set_adapter(translation: ForeignTranslation) -> bool:
    """Set the adapters' keys as TRL names them. Return whether all weights are trained."""
    tuning, bits = translation.get("tuner_type"), translation.get("quant_bits")
    if tuning not in ("lora", "full"):
        raise ValueError(f"ms-swift's tuner_type {tuning} has no counterpart here; lora and full have")
    if tuning == "lora":
        for name, value in {"use_peft": True, "lora_r": 8, "lora_alpha": 32, "lora_dropout": 0.05}.items():
            translation.given.setdefault(name, value)
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
    least, lr = translation.get("min_lr"), translation.run.get(f"{TRAINER}.optimizer.lr")
    if least and lr and translation.run.get(f"{TRAINER}.optimizer.schedule") != "constant":
        translation.set(f"{TRAINER}.optimizer.min_lr_ratio", round(float(least) / float(lr), 6))
    if translation.get("dynamic_sample", False):
        translation.set("filter.fn", "varied")
    if nll := translation.get("rpo_alpha"):
        translation.set("loss.nll_coef", float(nll) if trainer == "dpo" else None)
    granularity = translation.get("recompute_granularity")
    if granularity in ("full", "selective"):
        translation.set(f"{TRAINER}.activation_checkpointing", granularity)
    for theirs, ours in {"vit": "tower", "aligner": "projector", "llm": "language"}.items():
        if translation.get(f"freeze_{theirs}") is True:
            translation.set(f"{TRAINER}.vision.{ours}", "freeze")
