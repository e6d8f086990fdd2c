"""Reads where the processes of models are (placement.json), and what config.yaml says of the models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from coalign.files import read_json_object

# What config.yaml says of a model that tells where it is and what it may need.
_SETTINGS = ("load", "like", "module", "num_gpu", "num_process", "tensor_parallel", "pipeline_parallel", "offload")


def read_placement(folder: Path, params: Mapping[str, str]) -> dict[str, Any]:
    """Return the `placement` (null: the run wrote none), and the `settings` of each model in config.yaml."""
    return {"placement": read_placement_file(folder), "settings": _read_settings(folder)}


def read_placement_file(folder: Path) -> dict[str, Any] | None:
    """Return placement.json (coalign.launch.layout.describe_placement); None if the run wrote none."""
    path = folder / "placement.json"
    if not path.is_file():
        return None
    placement = read_json_object(path)
    if not isinstance(placement.get("nodes"), list) or not isinstance(placement.get("models"), dict):
        raise ValueError(f"{path}: expected a list `nodes` and an object `models`")
    return placement


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.yaml, not resolved; empty if it is missing. ValueError if it is damaged."""
    path = folder / "config.yaml"
    if not path.is_file():
        return {}
    try:
        config = yaml.load(path.read_bytes(), yaml.CSafeLoader)
    except yaml.YAMLError as problem:
        raise ValueError(f"{path} is no YAML") from problem
    return config if isinstance(config, dict) else {}


def _read_settings(folder: Path) -> dict[str, dict[str, Any]]:
    models = read_config(folder).get("models") or {}
    return {
        name: {key: model[key] for key in _SETTINGS if model.get(key) not in (None, 1, 0)}
        for name, model in models.items()
        if isinstance(model, dict)
    }
