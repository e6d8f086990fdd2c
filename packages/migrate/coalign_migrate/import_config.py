"""`coalign import-config`: writes a run's YAML from the configuration of another framework."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from coalign.config.errors import ConfigError, suggest
from coalign.config.layering import escape_references
from coalign.config.yaml_reader import emit, emit_inline
from coalign_migrate.axolotl import translate_axolotl
from coalign_migrate.chatlearn import translate_chatlearn
from coalign_migrate.llama_factory import translate_llama_factory
from coalign_migrate.openrlhf import translate_openrlhf
from coalign_migrate.slime import translate_slime
from coalign_migrate.source import ForeignSource, read_source
from coalign_migrate.swift import translate_swift
from coalign_migrate.translation import ForeignTranslation
from coalign_migrate.trl import TRAINERS, find_trainer, translate_trl
from coalign_migrate.verl import translate_verl, translate_verl_sft

_ORDER = ("algorithm", "seed", "output", "runtime", "data", "rollout", "filter", "reward", "truncated", "advantage")
_ORDER += ("loss", "kl", "models")


def import_config(path: Path, trainer: str | None = None) -> str:
    """Return the YAML of a run for a file of another framework, with lists of what a person has to know and to do.

    ``trainer`` names TRL's trainer where the file does not. ValueError for a file of an unknown framework or program,
    and for one that names no model or no data.
    """
    source = read_source(path)
    try:
        translation = translate(source, trainer)
        _require_inputs(translation, path)
    except ConfigError:
        raise
    except ValueError as error:
        message = str(error)
        raise ValueError(message if message.startswith(str(path)) else f"{path}: {message}") from error
    return write_translation(translation, path.name)


def translate(source: ForeignSource, trainer: str | None = None) -> ForeignTranslation:
    """Translate the settings of a source. ValueError for a program that has no recipe here."""
    translation = _translate(source, trainer)
    translation.notes += source.notes
    run = translation.run
    if translation.main == "policy" and not run.get("reward") and run["algorithm"] != "on_policy_distillation":
        run["reward"] = [{"fn": "<math or my.module:function>"}]
    if run["algorithm"] == "gspo" and run.get("loss.is_level") == "token":
        translation.notes.append("importance weights of tokens have no place in the loss of `gspo`: the run has none")
        translation.drop("loss.is_")
    if not run.get("data.eval"):  # a run without rows to evaluate has no evaluations
        if run.get("runtime.eval_every"):
            translation.notes.append("runtime.eval_every is left out: there is no data.eval")
        translation.drop("runtime.eval_")
    return translation


def _translate(source: ForeignSource, trainer: str | None) -> ForeignTranslation:
    program, values = str(source.program), source.values
    match source.framework:
        case "verl" if program.endswith(("sft_trainer", "sft_trainer_ray")):
            return translate_verl_sft(values)
        case "verl":
            return translate_verl(program, values)
        case "chatlearn":
            return translate_chatlearn(values)
        case "openrlhf":
            return translate_openrlhf(program, values)
        case "slime":
            return translate_slime(values)
        case "llama_factory":
            return translate_llama_factory(values, source.folder)
        case "swift":
            return translate_swift(program, values)
        case "axolotl":
            return translate_axolotl(values)
    name = trainer or find_trainer(source.program, values)
    if name not in TRAINERS:
        raise ValueError(f"TRL's trainer is '{name}'{suggest(name, TRAINERS)}")
    return translate_trl(name, values)


def _require_inputs(translation: ForeignTranslation, path: Path) -> None:
    """Refuse a file from which no model or no data was read: it would begin a run of defaults."""
    keys = (("model", f"models.{translation.main}.load"), ("data", "data.train"))
    for (what, key), name in zip(keys, translation.keys.inputs, strict=True):
        if not translation.run.get(key):
            ended = "".join(f"; {note}" for note in translation.notes if "begins no command" in note)
            raise ValueError(f"{path}: no {what} was read; in files of {translation.keys.name} it is {name}{ended}")


def write_translation(translation: ForeignTranslation, file: str) -> str:
    """Write the run's YAML; comments before it list every key of the other file that is not in it, and why."""
    name = translation.keys.name
    lines = [
        f"From {file} ({name}), by `coalign import-config`. Next: `coalign check` on this file.",
        f"Defaults of {name} that change results are written out; the rest is Coalign's default.",
    ]
    untranslated = [_describe(*entry) for entry in translation.list_untranslated()]
    unknown = [f"{key}: {text}" for key, text in translation.list_unknown()]
    lines += _list_under(f"To fill in ({len(unknown)}):", unknown)
    lines += _list_under(f"Not translated ({len(untranslated)}):", untranslated)
    lines += _list_under("To know:", dict.fromkeys(translation.notes))
    lines += _list_under("Not needed here:", [_describe(*entry) for entry in translation.list_unneeded()])
    nested = _nest(translation.run)
    ordered = sorted(nested, key=lambda key: _ORDER.index(key) if key in _ORDER else len(_ORDER))
    sections = "".join(emit(escape_references({key: nested[key]})) for key in ordered)
    return "".join(f"# {line}".rstrip() + "\n" for line in lines) + "\n" + sections


def _describe(key: str, value: Any, reason: str) -> str:
    written = emit_inline(value).replace("\n", " ")
    return f"{key} = {written}" + (f": {reason}" if reason else "")


def _list_under(title: str, entries: Iterable[str]) -> list[str]:
    lines = [f"  {entry}" for entry in entries]
    return ["", title, *lines] if lines else []


def _nest(run: dict[str, Any]) -> dict[str, Any]:
    """Turn dotted keys into mappings of mappings."""
    nested: dict[str, Any] = {}
    for key, value in run.items():
        *sections, last = key.split(".")
        inner = nested
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
    return nested
