"""Reads where the processes of models are (placement.json), and what config.yaml says of the models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coalign.board.readers import read_object
from coalign.board.readers.configuration import read_settings

# What config.yaml says of a model that tells where it is and what it may need.
_SETTINGS = ("load", "like", "module", "num_gpu", "num_process", "tensor_parallel", "pipeline_parallel", "offload")


def read_placement(folder: Path, params: Mapping[str, str]) -> dict[str, Any]:
    """Return the `placement` (null: the run wrote none), and the telling `settings` of each model in config.yaml."""
    settings: dict[str, dict[str, Any]] = {}
    for key, value in read_settings(folder).items():
        section, _, rest = key.partition(".")
        model, _, name = rest.partition(".")
        if section == "models" and name in _SETTINGS and value not in (None, 0, 1):
            settings.setdefault(model, {})[name] = value
    return {"placement": find_placement(folder), "settings": settings}


def find_placement(folder: Path) -> dict[str, Any] | None:
    """Return placement.json (coalign.engine.hooks.recorder.describe_placement); None if the run wrote none."""
    try:
        placement = read_object(folder, "placement.json")
    except FileNotFoundError:
        return None
    if not isinstance(placement.get("nodes"), list) or not isinstance(placement.get("models"), dict):
        raise ValueError("placement.json: expected a list `nodes` and an object `models`")
    return placement
