"""Reads the configuration of another framework: a YAML file, a script of a shell, or a Python script of TRL."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from coalign.config.yaml_reader import parse, parse_scalar
from coalign_migrate.chatlearn_source import ChatLearnReader
from coalign_migrate.keys.foreign_keys import load_keys
from coalign_migrate.keys.messages import find_framework
from coalign_migrate.python_source import read_python
from coalign_migrate.shell.marks import is_known, mark
from coalign_migrate.shell.script import ShellCommand, ShellScript

_MODULE = re.compile(r"(verl|recipe|openrlhf\.cli|trl\.scripts|axolotl\.cli|swift\.cli|llamafactory)[\w.]*\.(\w+)")
_SCRIPT = re.compile(r"(?:.*/)?(\w+)\.py")
_COMMANDS = {"trl": "trl", "llamafactory-cli": "llama_factory", "lmf": "llama_factory", "axolotl": "axolotl"}
_COMMANDS |= {"swift": "swift", "megatron": "swift"}
_FRAMEWORKS = {"verl": "verl", "recipe": "verl", "openrlhf.cli": "openrlhf", "trl.scripts": "trl"}
_FRAMEWORKS |= {"axolotl.cli": "axolotl", "swift.cli": "swift", "llamafactory": "llama_factory"}
_LAUNCHERS = re.compile(r"--(num_processes|nproc[_-]per[_-]node)(?:=|$)")
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_SEPARATORS = (";", "&&", "|", "&")


@dataclass(frozen=True)
class ForeignSource:
    """The settings of a file, and whose they are.

    ``framework`` is `verl`, `openrlhf`, `trl`, `chatlearn`, `slime`, `llama_factory`, `swift` or `axolotl`; ``program``
    that of the framework, if the file names it. ``values`` that are not known are between marks (`shell/marks.py`).
    ``notes`` are what a person has to know of the files that were read.
    """

    framework: str
    program: str | None
    values: dict[str, Any]
    notes: tuple[str, ...] = ()
    folder: Path = Path()


def read_source(path: Path) -> ForeignSource:
    """Read a file. ValueError if it is of no framework that is known; OSError if it cannot be read."""
    text = path.read_text(encoding="utf-8")
    if path.suffix.lower() in (".yaml", ".yml", ".json"):
        return _read_yaml(text, path)
    if path.suffix.lower() == ".py":
        trainer, values, notes = read_python(text, path)
        return ForeignSource("trl", trainer, values, tuple(notes), path.parent)
    return read_command(text, path)


def _read_yaml(text: str, path: Path) -> ForeignSource:
    data, _ = parse(text, str(path))
    framework = find_framework(data)
    if framework == "chatlearn":
        return _read_chatlearn(data, path, {}, [])
    if framework is None:
        raise ValueError(
            f"{path}: neither verl's (`actor_rollout_ref`), ChatLearn's (`models` and `num_episode`), TRL's or "
            "LLaMA-Factory's (`model_name_or_path`), ms-swift's (`model` and `dataset`) nor Axolotl's (`base_model`); "
            "OpenRLHF and slime have no YAML, give the script with its command line"
        )
    if framework == "verl":
        values = dict(_flatten(_interpolate(data, path), ""))
        program = "verl.trainer." + ("main_ppo" if "actor_rollout_ref" in data else "sft_trainer")
        return ForeignSource("verl", program, values, folder=path.parent)
    return ForeignSource(framework, None, dict(data), folder=path.parent)


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
    if find_framework(data) != "chatlearn":
        raise ValueError(f"{path}: not ChatLearn's, which has `models` and `num_episode`")
    reader = ChatLearnReader(path.parent, os.environ | dict(variables))
    resolved = [(key, reader.resolve(value)) for key, value in overrides]
    values = dict(_flatten(_interpolate(reader.read(data), path, resolved), ""))
    return ForeignSource("chatlearn", None, values, tuple(reader.notes), path.parent)


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


def read_command(text: str, path: Path) -> ForeignSource:
    """Read the command in a shell script. ValueError if it starts no program of a framework that is known."""
    script = ShellScript(text, str(path))
    read = [source for command in script.commands if (source := _CommandReader(script, path).read(command))]
    if not read:
        raise ValueError(
            f"{path}: no command of verl (`-m verl.trainer.main_ppo`), OpenRLHF (`-m openrlhf.cli.train_…`), slime "
            "(`train.py --hf-checkpoint …`), ChatLearn (`entrypoint.py grpo --config-file …`), TRL (`trl grpo`, "
            "`grpo.py`), LLaMA-Factory (`llamafactory-cli train`), ms-swift (`swift sft`) or Axolotl (`axolotl train`)"
            + "".join(f"; {note}" for note in script.notes if "begins no command" in note)
        )
    notes = [*read[0].notes, *script.notes]
    if len(read) > 1:
        notes.append(f"{path.name} starts {len(read)} programs; this is the first")
    source = read[0]
    return ForeignSource(source.framework, source.program, source.values, tuple(notes), path.parent)


class _CommandReader:
    """Reads one command of a script."""

    def __init__(self, script: ShellScript, path: Path) -> None:
        self.script, self.path = script, path

    def read(self, command: ShellCommand) -> ForeignSource | None:
        """Return the settings of a command; None if it starts no program that is known."""
        words = list(command.words)
        if "-c" in words[:-1] and Path(words[0]).name in ("bash", "sh", "srun", "docker", "ssh", "nohup", "timeout"):
            inner = ShellScript(words[words.index("-c") + 1], str(self.path))
            return next((source for inner_command in inner.commands if (source := self.read(inner_command))), None)
        for index, word in enumerate(words):
            following = words[index + 1] if index + 1 < len(words) else ""
            arguments = _cut(words[index + 1 :])
            if word in _COMMANDS and index <= 1 and following.isidentifier():
                program = f"megatron {following}" if word == "megatron" else following
                return self._read_program(_COMMANDS[word], program, arguments[1:], words[:index], command)
            if (match := _MODULE.fullmatch(word)) and (
                index == 0 or words[index - 1] in ("-m", "--module", "deepspeed")
            ):
                framework = _FRAMEWORKS[match[1]]
                program = word if framework == "verl" else match[2]
                return self._read_program(framework, program, arguments, words[:index], command)
            if match := _SCRIPT.fullmatch(word):
                return self._read_script(match[1], word, arguments, words[:index], command)
        return None

    def _read_script(
        self, name: str, word: str, arguments: list[str], preceding: Sequence[str], command: ShellCommand
    ) -> ForeignSource | None:
        """Read a command whose program is a file."""
        if file := self._find_chatlearn_file(arguments):
            data, _ = parse(file.read_text(encoding="utf-8"), str(file))
            variables = {key: value for key, value in self.script.variables.values.items() if isinstance(value, str)}
            words = [re.sub(r"\$\{(\w+)\}", r"$\1", word) if not is_known(word) else word for word in arguments]
            return _read_chatlearn(data, file, variables, list(_read_overrides(words)))
        if name in ("train", "train_async") and "--hf-checkpoint" in arguments:
            return self._read_program("slime", name, arguments, preceding, command)
        for folder, framework in {"verl/": "verl", "openrlhf/cli/": "openrlhf", "swift/cli/": "swift"}.items():
            if folder in word:
                program = word.removesuffix(".py").replace("/", ".") if framework == "verl" else name
                return self._read_program(framework, program, arguments, preceding, command)
        if any(re.match(r"\+*actor_rollout_ref\.", argument) for argument in arguments):
            return self._read_program("verl", name, arguments, preceding, command)
        flags = [argument.partition("=")[0] for argument in arguments]
        if "--model_name_or_path" in flags or "--config" in flags:
            return self._read_program("trl", name, arguments, preceding, command)
        return None

    def _read_program(
        self, framework: str, program: str, words: list[str], preceding: Sequence[str], command: ShellCommand
    ) -> ForeignSource:
        if framework == "verl":
            return self._read_verl(program, words)
        values = _read_flags(words)
        files = [word for word in words if re.search(r"\.(ya?ml|json)$", word) and is_known(word)]
        if files and (words[0] == files[0] or words[words.index(files[0]) - 1] == "--config"):
            values.pop("config", None)
            values = self._read_config(files[0]) | dict(_read_overrides(words)) | values
        values |= _count_processes([*preceding, *words], command.variables)
        values.pop("nproc_per_node", None)
        return ForeignSource(framework, program, values)

    def _read_verl(self, program: str, words: list[str]) -> ForeignSource:
        """Read Hydra's command line, over the file that it names."""
        flags = _read_flags([word for word in words if word.startswith("--")] + _list_after(words, "--config-name"))
        name = str(flags.get("config_name", "")).removesuffix(".yaml")
        values, notes = {}, []
        if name and not name.endswith(("ppo_trainer", "sft_trainer_engine", "ppo_megatron_trainer")):
            folder = self.path.parent / str(flags.get("config_path", "config"))
            file = folder / f"{name}.yaml"
            if file.is_file():
                data, _ = parse(file.read_text(encoding="utf-8"), str(file))
                values = dict(_flatten(_interpolate(data, file), ""))
            elif any("adv_estimator=" in word for word in words):
                notes.append(f"{name}.yaml is not at {file}: what it sets beside verl's defaults is not known")
            else:
                raise ValueError(f"{self.path}: the configuration that it names, {name}.yaml, is not at {file}")
        if "megatron" in name:
            values["actor_rollout_ref.actor.strategy"] = "megatron"
        return ForeignSource("verl", program, _resolve(values | dict(_read_overrides(words))), tuple(notes))

    def _read_config(self, name: str) -> dict[str, Any]:
        """Return the values of a YAML file: one that the script writes, or one beside it or here."""
        file = next((file for folder in (*self.path.parents, Path()) if (file := folder / name).is_file()), Path(name))
        text = self.script.files.get(name) or file.read_text(encoding="utf-8")
        data, _ = parse(text, name)
        return dict(data) if isinstance(data, Mapping) else {}

    def _find_chatlearn_file(self, words: list[str]) -> Path | None:
        """Return the YAML behind `--config-file` or `-c`: a path from here, or from a folder above the script."""
        names = _list_after(words, "--config-file")[1:] or _list_after(words, "-c")[1:]
        if not names or not is_known(names[0]):
            return None
        return next((file for folder in self.path.parents if (file := folder / names[0]).is_file()), Path(names[0]))


def _resolve(values: dict[str, Any]) -> dict[str, Any]:
    """Return values with those that they refer to by `${a.b}`; what is not in them is marked."""

    def find(match: re.Match[str]) -> str:
        value = values.get(match[1], load_keys("verl").defaults.get(match[1]))
        return match[0] if value is None else str(value)

    resolved = dict(values)
    for key, text in values.items():
        if isinstance(text, str) and is_known(text) and "${" in text:
            interpolated = _REFERENCE.sub(find, text)
            resolved[key] = mark(interpolated) if "${" in interpolated else parse_scalar(interpolated)
    return resolved


def _cut(words: list[str]) -> list[str]:
    """Return the words before a separator that stands in quotes, or came of a variable."""
    return words[: next((index for index, word in enumerate(words) if word in _SEPARATORS), len(words))]


def _list_after(words: list[str], flag: str) -> list[str]:
    """Return a flag and the word behind it, if it is there."""
    return next(([flag, words[index + 1]] for index, word in enumerate(words[:-1]) if word == flag), [])


def _count_processes(words: Sequence[str], variables: Mapping[str, str]) -> dict[str, int]:
    """Return the processes that a launcher starts on a node: its flag, or ms-swift's NPROC_PER_NODE."""
    for index, word in enumerate(words):
        if _LAUNCHERS.match(word):
            text = word.partition("=")[2] or (words[index + 1] if index + 1 < len(words) else "")
            return {"num_processes": int(text)} if text.isdigit() else {}
    text = variables.get("NPROC_PER_NODE", "")
    return {"num_processes": int(text)} if text.isdigit() else {}


def _read_overrides(words: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield the settings of Hydra's command line: `key=value`, `+key=value`, and `~key`, which is null."""
    for word in words:
        key, separated, value = word.partition("=")
        if word.startswith("~") and not separated:
            yield word[1:], None
        elif separated and not word.startswith("-") and re.fullmatch(r"\+*[\w.@/\[\]-]+", key):
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
        elif key is not None:
            values[key].append(_read_value(word))
    return {name: (items[0] if len(items) == 1 else items) if items else True for name, items in values.items()}


def _read_value(word: str) -> Any:
    """Return the number, truth value or text of a flag; a template such as `User: {}` stays a text."""
    value = parse_scalar(word)
    return word if isinstance(value, dict | list) else value
