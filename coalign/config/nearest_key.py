"""Corrects a key that the schema does not have: the intended key may be in another section."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, get_args, get_origin

from coalign.config.errors import Key, find_nearest, format_key, suggest
from coalign.config.introspect import list_keys, unwrap_type
from coalign.config.schema import Section

# Keys that had another name in an earlier version, by their paths.
RENAMED = {"data.on_missing_key": "data.bad_rows"}
# What people call keys; names that other frameworks have are in coalign-migrate.
_SYNONYMS = {
    "load": ("path", "model", "model_path", "model_name", "name_or_path", "pretrained", "checkpoint"),
    "rank": ("r",),
    "target": ("target_modules",),
    "num_gpu": ("gpus", "num_gpus", "n_gpus", "gpu", "ngpus", "gpus_per_node", "devices", "world_size"),
    "steps": ("num_steps", "total_steps", "train_steps", "training_steps", "iterations", "max_iters"),
    "epochs": ("num_epochs", "n_epochs", "epoch"),
    "prompts_per_step": ("batch_size", "global_batch_size", "batch"),
    "samples_per_prompt": ("group_size", "n", "num_samples", "n_samples", "num_rollouts"),
    "max_tokens_per_micro": ("micro_batch_size", "micro_batch", "mini_batch_size"),
    "max_new_tokens": ("max_tokens", "max_response_length", "response_length", "max_gen_len", "max_completion_tokens"),
    "max_prompt_tokens": ("prompt_length", "max_prompt_len"),
    "train": ("dataset", "datasets", "train_data", "train_file", "train_files", "prompts", "files", "train_path"),
    "eval": ("val", "validation", "test", "dev", "eval_data", "eval_file", "val_data", "test_data"),
    "output": ("out", "save_dir", "run_dir", "log_dir"),
    "eval_every": ("eval_freq", "eval_interval", "val_every", "evaluate_every"),
    "save_every": ("save_freq", "save_interval", "checkpoint_every", "ckpt_every"),
    "trackers": ("wandb", "tensorboard", "mlflow", "logger", "loggers", "tracker"),
    "optimizer": ("optim",),
    "schedule": ("lr_schedule", "scheduler"),
    "warmup": ("num_warmup_steps", "lr_warmup_steps"),
    "clip_grad_norm": ("grad_clip", "clip_grad", "gradient_clipping", "max_grad"),
    "compute_dtype": ("precision", "mixed_precision", "fp16"),
    "tensor_parallel": ("tp", "tp_size", "tensor_parallel_size"),
    "pipeline_parallel": ("pp", "pp_size", "pipeline_parallel_size"),
    "context_parallel": ("cp", "cp_size", "context_parallel_size", "sequence_parallel_size"),
    "expert_parallel": ("ep", "ep_size", "expert_parallel_size"),
    "module": ("backend", "strategy"),
    "reward": ("rewards", "reward_fn", "reward_function", "reward_model"),
    "resume": ("resume_from_checkpoint", "resume_from", "load_checkpoint"),
}
_MEANT = {synonym: name for name, synonyms in _SYNONYMS.items() for synonym in synonyms}
_SAMPLED = ("sampling", "native", "vllm", "transformers")  # sections of the model that samples
_ALL_MODELS = ("num_gpu", "num_process", "module", "load", "tokenizer", "dtype", "threads", "like", "placement")
_MAX_SHOWN = 2  # keys that a message names
_SURE = 0.75  # from this similarity on, a name of another section counts as misspelt


def describe_renaming(key: Key) -> str | None:
    """Say what a key of an earlier version is called now, as the end of a sentence; None for others."""
    new = RENAMED.get(format_key(key))
    return None if new is None else f"is called {new} now"


def find_elsewhere(key: Key, value: Any, root: type[Section]) -> str | None:
    """Name the keys of other sections that an unknown ``key`` may have meant, as the end of a sentence; else None.

    They have its name, or one that people call so. A section that does not exist is followed to the keys that were
    written in it.
    """
    section, name = key[:-1], str(key[-1])
    keys = _find_all(section, name, root)
    if not keys and find_nearest(name, list_keys(section, root)):
        return None  # a sibling is misspelt
    names = [f"'{format_key(match)}'" for match in dict.fromkeys(_follow_inside(keys, key, value, root))]
    return f"; did you mean {' or '.join(names[:_MAX_SHOWN])}?" if names else None


def suggest_key(key: Key, value: Any, root: type[Section]) -> str:
    """Say which sibling, or else which key of the whole schema, an unknown ``key`` is spelled like; else all siblings.

    What it returns is the end of a sentence.
    """
    section, name = key[:-1], str(key[-1])
    siblings, names = list_keys(section, root), dict.fromkeys(str(path[-1]) for path in _list_schema(root))
    if not find_nearest(name, siblings) and (near := find_nearest(name, names, _SURE)):
        return find_elsewhere((*section, near), value, root) or suggest(name, siblings)
    return suggest(name, siblings)


def _find_all(section: Key, name: str, root: type[Section]) -> list[Key]:
    """Find the keys that are called ``name`` and share most sections with ``section``."""
    names = (name, _MEANT.get(name.lower()))
    keys = [_name_model(key, section) for key in _list_schema(root) if key[-1] in names]
    ranked = sorted(keys, key=lambda key: (*_rank(key, section, name), key[0] != "models"))
    return [key for key in ranked if _rank(key, section, name) == _rank(ranked[0], section, name)]


def _rank(key: Key, section: Key, name: str) -> tuple[int, bool, int]:
    """Order keys by shared sections, synonyms before the same name elsewhere, and depth without the model's name."""
    shared = next((i for i, pair in enumerate(zip(key, section, strict=False)) if pair[0] != pair[1]), len(section))
    return -shared, key[-1] == name, len(key) - (key[0] == "models")


def _follow_inside(keys: list[Key], key: Key, value: Any, root: type[Section]) -> list[Key]:
    """Replace sections by the keys inside that ``value`` has.

    Where nothing is called like the ``key``, it may be the name of a model; else its inner keys are looked for alone.
    """
    if not isinstance(value, dict) or not value:
        return keys
    if not keys and len(key) == 1 and set(value) <= set(list_keys(("models", *key), root)):
        return [("models", *key, name) for name in value]
    if not keys:
        return [path for name in value for path in _find_all(key[:-1], str(name), root)[:1]]
    inside = [
        (*key, name)
        for key in keys
        for written in value
        for name in (str(written), _MEANT.get(str(written), ""))
        if name in list_keys(key, root)
    ]
    return inside or keys


def _name_model(key: Key, section: Key) -> Key:
    """Put the name of a model into a key that every model has: the section's, or the one that usually has it."""
    if key[0] != "models" or len(key) < 3:
        return key
    usual = "policy" if key[2] in _SAMPLED else "NAME" if key[2] in _ALL_MODELS else "trainer"
    return ("models", section[1] if section[:1] == ("models",) and len(section) > 1 else usual, *key[2:])


@cache
def _list_schema(root: type[Section]) -> tuple[Key, ...]:
    """List all keys of the schema. The name of a model, which is the person's, is a star."""
    return tuple(_iterate_keys(root, ()))


def _iterate_keys(section: type[Section], key: Key) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        yield (*key, name)
        annotation, below = unwrap_type(field.annotation), (*key, name)
        while get_origin(annotation) in (list, dict):
            if get_origin(annotation) is dict:
                below = (*below, "*")
            annotation = unwrap_type(get_args(annotation)[-1])
        if isinstance(annotation, type) and issubclass(annotation, Section):
            yield from _iterate_keys(annotation, below)
