"""Reads ChatLearn's YAML: variables of the environment with defaults, included files, a file for each model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coalign.config.yaml_reader import parse, parse_scalar
from coalign_migrate.keys.foreign_keys import load_keys
from coalign_migrate.shell.marks import mark

_VARIABLE = re.compile(r"\$\{(\w+)(?::([^}]*))?\}")  # `${NAME}`, `${NAME:default}`; a path has dots: `${models.a.b}`
OLD_NAMES = {"ppo_policy": "policy_trainer", "ppo_value": "value_trainer", "reference": "ref_policy"}
_SECTIONS = ("runtime_args", "runtime", "rlhf")


class ChatLearnReader:
    """Reads a file of ChatLearn with all files that it names.

    ``variables`` are those of the environment. ``notes`` are what a person has to know of the files: variables without
    a value, and settings of model files that nothing here takes.
    """

    def __init__(self, folder: Path, variables: Mapping[str, str]) -> None:
        self.folder, self.variables = folder, variables
        self.notes: list[str] = []
        self._unset: list[str] = []

    def read(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return sections by the names of 2025: `runtime_args`, and `models` with what their files say."""
        data = self._merge_included(data)
        sections = {("runtime_args" if name in _SECTIONS else name): value for name, value in data.items()}
        models = {OLD_NAMES.get(str(name), str(name)): dict(model or {}) for name, model in sections["models"].items()}
        if renamed := [f"{old} is {new}" for old, new in OLD_NAMES.items() if old in sections["models"]]:
            self.notes.append(f"names below are those of ChatLearn's files of 2025: {', '.join(renamed)}")
        for name, model in models.items():
            if file := model.pop("model_config_file", None):
                models[name] = self._read_model(name, file) | model
        if self._unset:
            self.notes.append(f"these variables have no value here: {', '.join(dict.fromkeys(self._unset))}")
        return sections | {"models": models}

    def _read_model(self, name: str, file: str) -> dict[str, Any]:
        """Return the settings of a model's file that the table knows; the rest is noted together."""
        values = self._read_file(file)
        translated = {
            key: value for key, value in values.items() if load_keys("chatlearn").describe(f"models.{name}.{key}")
        }
        if untranslated := sorted(set(values) - set(translated)):
            self.notes.append(f"models.{name}: of {file} these settings are not translated: {', '.join(untranslated)}")
        return translated

    def _read_file(self, name: str) -> dict[str, Any]:
        file = self.folder / name
        data, _ = parse(file.read_text(encoding="utf-8"), str(file))
        return self._merge_included(data or {})

    def _merge_included(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of a file over those of the files that it includes; of these, later ones win."""
        merged: dict[str, Any] = {}
        for name in data.get("includes", []):
            merged |= self._read_file(name)
        return merged | {key: self.resolve(value) for key, value in data.items() if key != "includes"}

    def resolve(self, value: Any) -> Any:
        """Replace variables by their values; `None` in a default is no value."""
        if isinstance(value, Mapping):
            return {key: self.resolve(item) for key, item in value.items()}
        variable = _VARIABLE.fullmatch(value.strip()) if isinstance(value, str) else None
        if not variable:
            return value
        text = self.variables.get(variable[1], variable[2])
        if text is None:
            self._unset.append(variable[1])
            return mark(f"${variable[1]}")  # without braces, which refer to other keys
        return None if text in (None, "", "None") else parse_scalar(text)
