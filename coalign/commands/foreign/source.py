"""Reads the configuration of another framework: a YAML file, or the script or command line that starts its program."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from coalign.commands.foreign.chatlearn_source import ChatLearnReader, is_chatlearn
from coalign.config.yaml_reader import parse, parse_scalar

_PROGRAM = re.compile(r"(?:-m\s+)?(verl\.trainer\.main_ppo|openrlhf\.cli\.(\w+)|trl\s+(\w+)|(\w+)\.py)(?=\s|$)")
_ASSIGNMENT = re.compile(r"(?:export\s+)?(\w+)=(.*)")
_ANSI_QUOTED = re.compile(r"\$'((?:[^'\\]|\\.)*)'")  # $'User: {}\n'
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")


@dataclass(frozen=True)
class ForeignSource:
    """The settings of a file, and whose they are.

    ``framework`` is `verl`, `openrlhf`, `trl` or `chatlearn`; ``program`` that of the framework, if the file names it.
    ``notes`` are what a person has to know of the files that were read.
    """

    framework: str
    program: str | None
    values: dict[str, Any]
    notes: tuple[str, ...] = ()


def read_source(path: Path) -> ForeignSource:
    """Read a file. ValueError if it is of no framework that is known; OSError if it cannot be read."""
    text = path.read_text(encoding="utf-8")
    if path.suffix.lower() in (".yaml", ".yml", ".json"):
        return _read_yaml(text, path)
    return read_command(text, str(path))


def _read_yaml(text: str, path: Path) -> ForeignSource:
    data, _ = parse(text, str(path))
    if not isinstance(data, Mapping):
        raise ValueError(f"{path}: expected keys with values, as verl, ChatLearn and TRL have them")
    if is_chatlearn(data):
        return _read_chatlearn(data, path, {}, [])
    resolved = _interpolate(data, path)
    if "actor_rollout_ref" in resolved:
        return ForeignSource("verl", None, dict(_flatten(resolved, "")))
    if "model_name_or_path" in resolved:
        return ForeignSource("trl", None, resolved)
    raise ValueError(
        f"{path}: neither verl's (`actor_rollout_ref`), ChatLearn's (`models` and `num_episode`) nor TRL's "
        "(`model_name_or_path`); OpenRLHF has no YAML, give the script with its command line"
    )


def _interpolate(data: Mapping[str, Any], path: Path, overrides: list[tuple[str, Any]] | None = None) -> dict[str, Any]:
    """Return a mapping with the values that its references, such as `${models.policy.load}`, stand for."""
    try:
        config = OmegaConf.create(dict(data))
        for key, value in overrides or []:
            OmegaConf.update(config, key, value)
        resolved = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise ValueError(f"{path}: {str(error).splitlines()[0]}") from error
    assert isinstance(resolved, dict)
    return {str(name): value for name, value in resolved.items()}


def _read_chatlearn(
    data: Mapping[str, Any], path: Path, variables: Mapping[str, str], overrides: list[tuple[str, Any]]
) -> ForeignSource:
    if not is_chatlearn(data):
        raise ValueError(f"{path}: not ChatLearn's, which has `models` and `num_episode`")
    reader = ChatLearnReader(path.parent, os.environ | dict(variables))
    resolved = [(key, reader.resolve(value)) for key, value in overrides]
    values = dict(_flatten(_interpolate(reader.read(data), path, resolved), ""))
    return ForeignSource("chatlearn", None, values, tuple(reader.notes))


def _flatten(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of all values; Hydra's own (`_target_`, `defaults`) are left out."""
    for name, item in value.items():
        if name in ("_target_", "defaults", "hydra"):
            continue
        key = f"{prefix}{name}"
        if isinstance(item, Mapping) and item:
            yield from _flatten(item, f"{key}.")
        elif item != "???" and item != {}:
            yield key, item


def read_command(text: str, source: str) -> ForeignSource:
    """Read the command line in a script; variables that the script itself sets are replaced by their values."""
    variables = {"HOME": str(Path.home())}
    for line in re.sub(r"\\\r?\n", " ", text).splitlines():
        line = line.strip()
        if assigned := _ASSIGNMENT.fullmatch(line):
            words = _split(assigned[2], variables)
            variables[assigned[1]] = " ".join(words)
        elif not line.startswith("#") and (found := _PROGRAM.search(line)):
            words = _split(line[found.end() :], variables)
            if (file := _find_chatlearn_file(words, source)) and not found[2]:
                data, _ = parse(file.read_text(encoding="utf-8"), str(file))
                return _read_chatlearn(data, file, variables, list(_read_overrides(words)))
            return _read_words(found, line[: found.start()], words, source)
    raise ValueError(
        f"{source}: no command of verl (`-m verl.trainer.main_ppo`), OpenRLHF (`-m openrlhf.cli.train_…`), ChatLearn "
        "(`entrypoint.py grpo --config-file …`) or TRL (`trl grpo`, `grpo.py`)"
    )


def _find_chatlearn_file(words: list[str], source: str) -> Path | None:
    """Return the YAML behind `--config-file` or `-c`: a path from here, or from a folder above the script."""
    flags = [index for index, word in enumerate(words[:-1]) if word in ("--config-file", "-c")]
    if not flags:
        return None
    name = words[flags[0] + 1]
    return next((file for folder in Path(source).parents if (file := folder / name).is_file()), Path(name))


def _split(text: str, variables: Mapping[str, str]) -> list[str]:
    """Split shell into words. Variables that are known have their values; the others stay as they are written."""
    text = _ANSI_QUOTED.sub(
        lambda m: shlex.quote(m[1].replace("\\n", "\n").replace("\\t", "\t").replace("\\'", "'")), text
    )
    known = _VARIABLE.sub(lambda m: variables.get(m[1] or m[3], m[2] if m[2] is not None else m[0]), text)
    return shlex.split(known, comments=True)


def _read_words(found: re.Match[str], before: str, words: list[str], source: str) -> ForeignSource:
    if found[1].startswith("verl"):
        return ForeignSource("verl", None, dict(_read_overrides(words)))
    values = _read_flags(words)
    if found[2]:
        return ForeignSource("openrlhf", found[2], values)
    if "--config" in words:
        file = Path(str(values.pop("config")))
        beside = Path(source).parent / file
        values = _read_yaml((beside if beside.exists() else file).read_text(encoding="utf-8"), file).values | values
    if processes := re.search(r"--num_processes[ =](\d+)", before):
        values.setdefault("num_processes", int(processes[1]))
    return ForeignSource("trl", found[3] or found[4], values)


def _read_overrides(words: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield the settings of Hydra's command line: `key=value`, `+key=value`."""
    for word in words:
        key, separated, value = word.partition("=")
        if separated and not word.startswith("-"):
            yield key.lstrip("+"), parse_scalar(value)


def _read_flags(words: list[str]) -> dict[str, Any]:
    """Return the values of flags: `--key value`, `--key=value`, `--key a b`, and `--key` alone, which is true."""
    values: dict[str, list[Any]] = {}
    key = None
    for word in words:
        if word.startswith("--"):
            key, separated, value = word.removeprefix("--").partition("=")
            key = key.replace("-", "_")
            values[key] = [_read_value(value)] if separated else []
        elif key is not None and word not in (";", "&&", "|", "&"):
            values[key].append(_read_value(word))
    return {name: (found[0] if len(found) == 1 else found) if found else True for name, found in values.items()}


def _read_value(word: str) -> Any:
    """Return the number, truth value or text of a flag; a template such as `User: {}` stays a text."""
    value = parse_scalar(word)
    return word if isinstance(value, dict | list) else value
