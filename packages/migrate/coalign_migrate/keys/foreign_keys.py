"""The table of one framework's keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from coalign.config.yaml_reader import parse

TRAINER, POLICY, VALUE = "models.trainer", "models.policy", "models.value"
SAMPLING = f"{POLICY}.sampling"
PLACED = "num_gpu is auto: the models share in turn the GPUs that are there"


@dataclass(frozen=True)
class ForeignKeys:
    """The keys of one framework, or of one of its programs.

    ``same`` maps a key to the dotted keys here (separated by blanks) that take its value, ``combined`` one that counts
    together with others to a description, and ``unneeded`` one without a counterpart, or a pattern (`profiler.*`), to
    the reason. ``defaults`` are the framework's own, where they change results and differ from Coalign's. ``renamed``
    maps other names of a key, of newer or older versions, to that in the table; a star at the end stays what it is.
    ``inputs`` are the framework's names of the model and of the data, for messages.
    """

    name: str
    same: Mapping[str, str]
    combined: Mapping[str, str]
    unneeded: Mapping[str, str]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    inputs: tuple[str, str] = ("", "")

    def describe(self, key: str) -> str | None:
        """Say what a key is called here, as a part of a sentence; None for an unknown one."""
        key = self.find_name(key)
        if key in self.same:
            return " and ".join(self.same[key].split())
        if description := _find(self.combined, key):
            return description
        reason = self.find_reason(key)
        return None if reason is None else f"not needed ({reason})"

    def find_name(self, key: str) -> str:
        """Return the name that a key has in the table."""
        name = key if key in self.renamed else next((name for name in self.renamed if fnmatchcase(key, name)), None)
        if name is None:
            return key
        new, fixed_text = self.renamed[name], name.removesuffix("*").rpartition("*")[2]  # the last star
        rest = key.partition(fixed_text)[2] if name.endswith("*") else key.rpartition(".")[2]
        return new.removesuffix("*") + rest if new.endswith("*") else new

    def find_reason(self, key: str) -> str | None:
        """Return why a key has no counterpart; None for one that has, and for an unknown one."""
        has_counterpart = key not in self.unneeded and (key in self.same or _find(self.combined, key))
        return None if has_counterpart else _find(self.unneeded, key)


@cache
def load_keys(name: str) -> ForeignKeys:
    """Return the table of a file in this folder, such as `verl`, over the one that it ``extends``."""
    data = _read(name)
    base = load_keys(data["extends"]) if "extends" in data else ForeignKeys("", {}, {}, {})
    reasons = _read("reasons")
    unneeded = {
        key if section == "_" else f"{section}.{key}": reasons.get(reason, reason)
        for section, groups in data.get("unneeded", {}).items()
        for reason, keys in groups.items()
        for key in keys
    }
    tables = {table: dict(_flatten(data.get(table, {}))) for table in ("same", "combined", "defaults", "renamed")}
    return ForeignKeys(
        data.get("name", base.name),
        same={**base.same, **tables["same"]},
        combined={**base.combined, **tables["combined"]},
        unneeded={**unneeded, **base.unneeded},
        defaults={**base.defaults, **tables["defaults"]},
        renamed={**tables["renamed"], **base.renamed},
        inputs=tuple(data.get("inputs", base.inputs)),
    )


def _read(name: str) -> dict[str, Any]:
    file = Path(__file__).parent / f"{name}.yaml"
    return parse(file.read_text(encoding="utf-8"), str(file))[0]


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys; `_` is the section itself."""
    for name, value in table.items():
        key = prefix.removesuffix(".") if name == "_" else f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{key}.")
        else:
            yield key, value


def _find(table: Mapping[str, str], key: str) -> str | None:
    """Return the value of a key, or of the first pattern that it matches."""
    if key in table:
        return table[key]
    return next((value for name, value in table.items() if "*" in name and fnmatchcase(key, name)), None)
