"""Reads where the processes of models are (placement.json), and what config.yaml says of the models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coalign_board.readers import read_object
from coalign_board.readers.configuration import read_settings

# These settings of a model tell where it is and what it may need.
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
    nodes, models = placement.get("nodes"), placement.get("models")
    if not _is_list(nodes, lambda node: isinstance(node, str)) or not isinstance(models, dict):
        raise ValueError("placement.json: expected a list `nodes` of names, and an object `models`")
    for name, model in models.items():
        if not isinstance(model, dict) or not _is_list(model.get("processes", []), _is_place):
            raise ValueError(f"placement.json: {name[:80]} has no list `processes` of [node, devices]")
    return placement


def _is_place(process: Any) -> bool:
    match process:
        case [int(node), list(devices)]:
            return node >= 0 and all(isinstance(device, str) for device in devices)
    return False


def _is_list(value: Any, is_item: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(is_item, value))
