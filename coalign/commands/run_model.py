"""The model of a run folder, and the chat template that it was trained with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coalign.config import load_section
from coalign.config.schema import DataConfig
from coalign.config.yaml_reader import MAX_BYTES, parse
from coalign.data.templates import TRAINING_TEMPLATES, is_jinja
from coalign.files import read_bounded, read_model_config
from coalign.hub import is_gguf, is_hub_name

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
