"""The configuration of a run, setting by setting, and what is different between runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coalign.config.errors import ConfigError, format_key
from coalign.config.yaml_reader import flatten, parse
from coalign.files import read_bounded, read_json_object
from coalign_board.catalog import find_within

_MAX_CONFIG_BYTES = 1 << 18  # a config.yaml of this size takes seconds to parse
# Runs that differ in these settings alone are one experiment with several seeds.
_SEED_SETTINGS = ("seed", "output", "runtime.resume", "runtime.allow_changed", "runtime.ray_address")


def read_configuration(folder: Path, params: Mapping[str, str]) -> dict[str, Any]:
    """Return `text`, the run's config.yaml (`file`: that of an earlier start), and the names of these `files`.

    `written` are the settings of the newest start that a person wrote, each with its value and its file and line; null
    if the run does not say.

    Secrets are references to environment variables there, and stay such.
    """
    files = ["config.yaml", *sorted((path.name for path in folder.glob("config.*.yaml")), key=_number)]
    name = params.get("file", "config.yaml")
    if name not in files:
        raise FileNotFoundError(f"there is no {name[:80]}; there are {', '.join(files)}")
    return {"text": _read_text(folder, name), "files": files, "written": _read_written(folder)}


def _read_written(folder: Path) -> list[list[str | None]] | None:
    try:  # it is made by coalign.config.export.list_written; the page shows config.yaml without it, too
        written = read_json_object(find_within(folder, folder / "written.json"), _MAX_CONFIG_BYTES)
        settings = read_settings(folder)
    except (OSError, ValueError):
        return None
    return [[key, _show(settings, key), str(location)] for key, location in written.items()]


def compare_configurations(folders: Sequence[Path]) -> dict[str, Any]:
    """Return the `settings` that are different between runs, and which runs are alike but for seeds.

    A setting is [key, value in each run], None where a run has no such key. `alike` has a number for each run: runs of
    one number have the same settings but for the seed.
    """
    flat = [read_settings(folder) for folder in folders]
    keys = list(dict.fromkeys(key for settings in flat for key in settings))
    different = [key for key in keys if len({json.dumps(s.get(key), default=str) for s in flat}) > 1]
    telling = [key for key in different if key not in _SEED_SETTINGS]
    numbers: dict[str, int] = {}
    alike = []
    for settings in flat:
        identity = json.dumps([settings.get(key) for key in telling], default=str)
        alike.append(numbers.setdefault(identity, len(numbers)))
    rows = [[key, [_show(settings, key) for settings in flat]] for key in different if key != "output"]
    return {"settings": rows, "alike": alike}


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of a run's config.yaml by their dotted keys. Raises ValueError if it is no YAML mapping."""
    try:
        content, _ = parse(_read_text(folder, "config.yaml"), "config.yaml")
    except (ConfigError, RecursionError) as problem:
        raise ValueError(f"config.yaml of {folder.name} cannot be read: {str(problem)[:200]}") from problem
    if not isinstance(content, Mapping):
        raise ValueError(f"config.yaml of {folder.name} holds no settings")
    return {format_key(key): value for key, value in flatten(content)}


def _show(settings: Mapping[str, Any], key: str) -> str | None:
    if key not in settings:
        return None
    value = settings[key]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _read_text(folder: Path, name: str) -> str:
    return read_bounded(find_within(folder, folder / name), _MAX_CONFIG_BYTES).decode(errors="replace")


def _number(name: str) -> tuple[int, str]:
    middle = name.split(".")[1]
    return (int(middle) if middle.isdecimal() else 0, name)
