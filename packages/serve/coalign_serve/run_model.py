"""The model of a run folder, the chat template that it was trained with, and the dtype that commands compute it in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from coalign.backends.engines.native import kernels
from coalign.config import load_section
from coalign.config.schema import DataConfig, ModelConfig
from coalign.config.yaml_reader import MAX_BYTES, parse
from coalign.data.templates import TRAINING_TEMPLATES, is_jinja
from coalign.devices import get_compute_capability
from coalign.files import read_bounded, read_model_config
from coalign.hub import fetch_model, find_directory, is_gguf, is_hub_name
from coalign.weights.model_files import SAFETENSORS, read_stored

CONFIG = "config.yaml"


def find_model(name: str) -> str:
    """Return the model of a run folder (its link `model`), or the name as it is.

    Raises ValueError for a run folder that has no model yet, and for a directory that is none or holds no model.
    """
    folder = Path(name)
    if not (folder / CONFIG).exists() or (folder / "config.json").exists():
        if not (is_hub_name(name) or is_gguf(name)):
            read_model_config(folder)
        return name
    if not (folder / "model").exists():
        raise ValueError(f"{name} is a run folder without a model: the run has not saved a checkpoint yet")
    return str(folder / "model")


def fetch_in_dtype(model: ModelConfig, dtype: str, device: str) -> ModelConfig:
    """Fetch a model; return its settings with ``dtype``, or for `auto` the dtype of `choose_dtype` on ``device``.

    Raises what `fetch_model` raises.
    """
    fetch_model(model)
    return model.model_copy(update={"dtype": choose_dtype(dtype, str(model.load), device)})


def choose_dtype(dtype: str, load: str, device: str) -> str:
    """Return ``dtype``; for `auto` bfloat16 if the fetched model has 16 bits a number, or fewer, and the device
    multiplies that, else float32.

    float16 becomes bfloat16, too: as many bits, which are rounded, and no overflow.
    """
    if dtype != "auto":
        return dtype
    return "bfloat16" if _has_short_numbers(load) and _multiplies_bf16(torch.device(device)) else "float32"


def _has_short_numbers(load: str) -> bool:
    """Whether the matrices of a model are stored in 16 bits or fewer, as config.json says of those in pickles."""
    directory = find_directory(load)
    if load.endswith(".gguf"):  # it is converted to float32, whatever it holds
        return Path(load).stat().st_size < 0.75 * (directory / SAFETENSORS).stat().st_size
    if stored := read_stored(directory):
        return not any(tensor.dtype in ("F32", "F64") for tensor in stored.values() if len(tensor.shape) > 1)
    fields = read_model_config(directory)
    return (fields.get("dtype") or fields.get("torch_dtype")) in ("bfloat16", "float16")


def _multiplies_bf16(device: torch.device) -> bool:
    if device.type == "cpu":
        return kernels.multiplies_bf16()
    return device.type != "cuda" or get_compute_capability(device) >= (8, 0)


def choose_template(model: str, chat_template: str | None, arguments: Mapping[str, Any] | None = None) -> DataConfig:
    """Choose how conversations become text for ``model``: as asked, else as the run that made it had them, else `auto`.

    Returns the keys of `data` that say so: `chat_template`, `chat_template_kwargs` and `reasoning`.
    """
    if chat_template is not None:
        return DataConfig(chat_template=chat_template, chat_template_kwargs=dict(arguments or {}))
    trained = _read_template_settings(Path(model))
    name, given = trained.chat_template, {**trained.chat_template_kwargs, **(arguments or {})}
    # The text of a file, which may have changed since, is in the tokenizer that the run saved.
    name = name if name in ("none", *TRAINING_TEMPLATES) or is_jinja(name) else "auto"
    return trained.model_copy(update={"chat_template": name, "chat_template_kwargs": given})


def _read_template_settings(model: Path) -> DataConfig:
    """Read what the run says of templates that a model belongs to; the defaults for a model of no run."""
    folder = _find_run(model.absolute())
    file = folder / CONFIG if folder else None
    data = parse(read_bounded(file, MAX_BYTES).decode(), str(file))[0] if file else None
    written = data.get("data") if isinstance(data, dict) and "algorithm" in data else None
    keys = ("chat_template", "chat_template_kwargs", "reasoning")
    return load_section(DataConfig, {key: written[key] for key in keys if key in written} if written else {})


def _find_run(model: Path) -> Path | None:
    """Find the run folder that a model is, or is in: as its `model`, or as the `hf` of a checkpoint."""
    if not (model / "config.json").exists():
        folder = model
    elif model.name == "model":
        folder = model.parent
    elif model.parent.name.startswith("step_") and model.parents[1].name == "checkpoints":
        folder = model.parents[2]
    else:
        return None
    return folder if (folder / CONFIG).is_file() else None
