"""Layers of a configuration: a recipe's defaults at the bottom, included files, the file, and overrides on top.

A later layer wins key by key; lists, texts and null replace the value. Nothing is validated here.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError

from coalign.config.errors import ConfigError, ConfigLocation, ConfigProblem, Key, KeyLocations, format_value, parse_key
from coalign.config.functions import name_object
from coalign.config.introspect import find_section, find_type, list_keys, unwrap_type
from coalign.config.schema import RunConfig, Section
from coalign.config.yaml_reader import MAX_BYTES, parse
from coalign.files import read_bounded


@dataclass
class ConfigLayer:
    """Plain data in the shape of ``schema``, with the locations of its keys and the problems of its text."""

    data: dict[str, Any] = field(default_factory=dict)
    locations: KeyLocations = field(default_factory=lambda: KeyLocations({}))
    problems: list[ConfigProblem] = field(default_factory=list)
    schema: type[Section] = RunConfig

    def lay(self, over: ConfigLayer) -> None:
        """Put a layer on top of this one."""
        self._forget_replaced(over.data, ())
        self.data = merge_layers(self.data, over.data)
        self.locations.lay(over.locations)
        self.problems += over.problems

    def _forget_replaced(self, over: dict[str, Any], key: Key) -> None:
        for name, value in over.items():
            if isinstance(value, dict):
                self._forget_replaced(value, (*key, name))
            else:
                self.locations.forget((*key, name))


def merge_layers(base: Any, over: Any) -> Any:
    """Add the keys of ``base`` that ``over`` does not have to ``over``."""
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    return base | {name: merge_layers(base.get(name), value) for name, value in over.items()}


def read_mapping(data: Mapping[str, Any], location: ConfigLocation, schema: type[Section] = RunConfig) -> ConfigLayer:
    """Make a layer of data that was not read from a file."""
    layer = ConfigLayer(expand_shorthands(data, (), schema), schema=schema)
    for key, _ in walk(data):
        layer.locations.put(key, location)
    return layer


def read_file(
    path: Path, trail: tuple[Path, ...] = (), asked: ConfigLocation | None = None, schema: type[Section] = RunConfig
) -> ConfigLayer:
    """Read a YAML file on top of the files that it includes, relative to it. Problems are collected, not raised."""
    if path.resolve() in [p.resolve() for p in trail]:
        circle = " → ".join(str(p) for p in (*trail, path))
        return ConfigLayer(problems=[ConfigProblem(("include",), f"files include each other: {circle}", asked)])
    try:
        text = read_bounded(path, 4 * MAX_BYTES).decode()
    except (OSError, ValueError) as error:
        return ConfigLayer(problems=[ConfigProblem(("include",) if asked else (), _unreadable(path, error), asked)])
    try:
        data, locations = parse(text, str(path))
    except ConfigError as error:
        return ConfigLayer(problems=list(error.problems))
    if not isinstance(data, dict | None):
        return ConfigLayer(
            problems=[
                ConfigProblem((), "expected keys with values, like `algorithm: grpo`", ConfigLocation(str(path), 1))
            ]
        )
    return read_includes(path, data or {}, KeyLocations(locations), trail, schema)


def read_includes(
    path: Path,
    data: dict[str, Any],
    locations: KeyLocations,
    trail: tuple[Path, ...] = (),
    schema: type[Section] = RunConfig,
) -> ConfigLayer:
    """Put ``data`` of the file ``path`` on top of the files that it includes."""
    included = data.pop("include", [])
    included = [included] if isinstance(included, str) else included
    layer = ConfigLayer(schema=schema)
    if not isinstance(included, list) or not all(isinstance(name, str) for name in included):
        layer.problems.append(
            ConfigProblem(("include",), "expected a file or a list of files", locations.find(("include",)))
        )
        included = []
    for index, name in enumerate(included):
        layer.lay(read_file(path.parent / name, (*trail, path), locations.find(("include", index)), schema))
    problems = [*_malformed_references(data, (), locations)]
    layer.lay(ConfigLayer({} if problems else expand_shorthands(data, (), schema), locations, problems))
    return layer


def walk(value: Any, key: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Yield ``value`` and everything below it, each with its key."""
    yield key, value
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from walk(item, (*key, name))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from walk(item, (*key, index))


def escape_references(value: Any) -> Any:
    """Escape ``${`` in texts, so that it is not read as a reference."""
    if isinstance(value, dict):
        return {name: escape_references(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [escape_references(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _malformed_references(value: Any, key: Key, locations: KeyLocations) -> Iterator[ConfigProblem]:
    for path, text in walk(value, key):
        if isinstance(text, str) and "${" in text:
            try:
                OmegaConf.create([text])
            except (GrammarParseError, RecursionError):
                message = f"{format_value(text)}: expected ${{key.of.this.file}} or ${{env:NAME,default}}"
                yield locations.on(ConfigProblem(path, message + r"; where ${ is meant as text, write \${"))


def apply_override(layer: ConfigLayer, override: str) -> None:
    """Apply the override ``key=value``: the value, read as YAML, replaces that of the dotted key."""
    name, equals, text = override.partition("=")
    location = ConfigLocation(f"override '{override}'")
    if name.startswith("-"):
        setting = f": `{override.lstrip('-')}`" if "." in name and equals else ", like runtime.steps=100"
        message = f"the command has no such option; a setting stands without dashes{setting}"
        layer.problems.append(ConfigProblem((), message, location))
        return
    if not equals or not name.strip():
        layer.problems.append(ConfigProblem((), "expected key=value, like runtime.steps=100", location))
        return
    key = parse_key(name.strip())
    is_text = unwrap_type(find_type(key, layer.schema)) is str
    try:
        value, _ = parse(text, "")
    except ConfigError as error:
        if not is_text:
            layer.problems += [ConfigProblem((), problem.message, location) for problem in error.problems]
            return
        value = text
    # A format like {prompt} is a mapping in YAML, and what is a text can be no mapping.
    set_key(layer, key, text if is_text and isinstance(value, dict | list) else value, location)


def set_key(layer: ConfigLayer, key: Key, value: Any, location: ConfigLocation) -> None:
    """Replace the value of ``key`` in the layer by ``value``, which was written at ``location``."""
    malformed = _malformed_references(value, key, layer.locations)
    if problems := [ConfigProblem(key, problem.message, location) for problem in malformed]:
        layer.problems += problems
        return
    try:
        _set(layer.data, key, expand_shorthands(value, key, layer.schema))
    except IndexError:
        layer.problems.append(ConfigProblem(key, "the list has no such item", location))
        return
    layer.locations.forget(key)
    for inner, _ in walk(value, key):
        layer.locations.put(inner, location)


def _set(data: Any, key: Key, value: Any) -> None:
    """Set ``value`` at ``key``; new mappings replace anything on the way that holds no keys."""
    container: dict[Any, Any] = data  # or a list, which is indexed alike
    for name in key[:-1]:
        inner = container.get(name) if isinstance(container, dict) else container[name]
        if not isinstance(inner, dict | list):
            container[name] = inner = {}
        container = cast(dict[Any, Any], inner)
    container[key[-1]] = value


def drop_foreign_arguments(base: Any, over: Any, key: Key = ()) -> Any:
    """Drop the arguments of those functions of ``base`` that ``over`` replaces by others."""
    if not isinstance(base, dict) or not isinstance(over, dict):
        return base
    kept = {name: drop_foreign_arguments(value, over.get(name), (*key, name)) for name, value in base.items()}
    if "fn" in base and over.get("fn", base["fn"]) != base["fn"]:
        return {name: value for name, value in kept.items() if name in list_keys(key)}
    return kept


def expand_shorthands(value: Any, key: Key, schema: type[Section] = RunConfig) -> Any:
    """Expand each text that stands for a section (``loss: sft``), so that layers can merge.

    Callables and paths, which only Python can pass, become texts.
    """
    if isinstance(value, Mapping):
        return {name: expand_shorthands(item, (*key, name), schema) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [expand_shorthands(item, (*key, index), schema) for index, item in enumerate(value)]
    if callable(value):
        value = name_object(value)
    elif isinstance(value, os.PathLike):
        value = os.fspath(value)
    section = find_section(key, schema) if isinstance(value, str) and "${" not in value else None
    return {section.shorthand: value} if section and section.shorthand else value


def _unreadable(path: Path, error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"there is no file '{path}'{suggest_file(path)}"
    if isinstance(error, UnicodeDecodeError):
        return f"'{path}' is not UTF-8 text"
    if isinstance(error, ValueError):
        return str(error)
    return f"'{path}' cannot be read: {error.strerror}"


def suggest_file(path: Path) -> str:
    """Suggest the most similar name in the directory of a missing file, as the end of a sentence."""
    folder = path.parent
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    match = difflib.get_close_matches(path.name, names, n=1, cutoff=0.6)
    return f"; did you mean '{folder / match[0]}'?" if match else ""
