"""`coalign import-config`: writes a run's YAML from the configuration of verl, OpenRLHF, ChatLearn or TRL."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from coalign.commands.foreign.chatlearn import translate_chatlearn
from coalign.commands.foreign.openrlhf import PROGRAMS, translate_openrlhf, translate_openrlhf_offline
from coalign.commands.foreign.source import ForeignSource, read_source
from coalign.commands.foreign.translation import ForeignTranslation
from coalign.commands.foreign.trl import TRAINERS, find_trainer, translate_trl
from coalign.commands.foreign.verl import translate_verl
from coalign.config.errors import suggest
from coalign.config.layers import escape_references
from coalign.config.yaml_edit import emit_inline
from coalign.config.yaml_reader import emit

_ORDER = ("algorithm", "seed", "output", "runtime", "data", "rollout", "filter", "reward", "truncated", "advantage")
_ORDER += ("loss", "kl", "models")


def import_config(path: Path, trainer: str | None = None) -> str:
    """Return the YAML of a run for a file of another framework, with a list of what was not translated.

    ``trainer`` names TRL's trainer where the file does not. ValueError for a file of an unknown framework or program.
    """
    source = read_source(path)
    return write_translation(translate(source, trainer), path.name)


def translate(source: ForeignSource, trainer: str | None = None) -> ForeignTranslation:
    """Translate the settings of a source. ValueError for a program that has no recipe here."""
    if source.framework == "verl":
        return translate_verl(source.values)
    if source.framework == "chatlearn":
        return translate_chatlearn(source.values, source.notes)
    if source.framework == "openrlhf":
        if source.program == "train_ppo_ray":
            return translate_openrlhf(source.values)
        if source.program not in PROGRAMS:
            known = ["train_ppo_ray", *PROGRAMS]
            raise ValueError(f"openrlhf.cli.{source.program} has no recipe here{suggest(str(source.program), known)}")
        return translate_openrlhf_offline(source.program, source.values)
    name = trainer or (source.program if source.program in TRAINERS else find_trainer(source.values))
    if name not in TRAINERS:
        raise ValueError(f"--trainer is '{name}'{suggest(name, TRAINERS)}")
    return translate_trl(name, source.values)


def write_translation(translation: ForeignTranslation, file: str) -> str:
    """Write the run's YAML; comments before it list every key of the other file that is not in it, and why."""
    name = translation.keys.name
    lines = [
        f"From {file} ({name}), by `coalign import-config`. Next: `coalign check` on this file.",
        f"Defaults of {name} that change results are written out; the rest is Coalign's default.",
    ]
    untranslated = [_describe(*entry) for entry in translation.list_untranslated()]
    lines += _list_under(f"Not translated ({len(untranslated)}):", untranslated)
    lines += _list_under("To know:", translation.notes)
    lines += _list_under("Not needed here:", [_describe(*entry) for entry in translation.list_unneeded()])
    nested = _nest(translation.run)
    ordered = sorted(nested, key=lambda key: _ORDER.index(key) if key in _ORDER else len(_ORDER))
    sections = "".join(emit(escape_references({key: nested[key]})) for key in ordered)
    return "".join(f"# {line}".rstrip() + "\n" for line in lines) + "\n" + sections


def _describe(key: str, value: Any, reason: str) -> str:
    written = emit_inline(value)
    return f"{key} = {written}" + (f": {reason}" if reason else "")


def _list_under(title: str, entries: Iterable[str]) -> list[str]:
    found = [f"  {entry}" for entry in entries]
    return ["", title, *found] if found else []


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
