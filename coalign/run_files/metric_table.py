"""Describes the metrics of a run: the entries of metrics.yaml, and which of them a name belongs to.

Start with `describe_metric`. An evaluation's metrics have the prefix `eval/`, with several sources also the name of the
source. Metrics of further trained models have the model's name as a prefix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

PATH = Path(__file__).with_name("metrics.yaml")
LANGUAGES = ("en", "zh")
_PLACEHOLDER = re.compile(r"<\w+>")
Texts = Mapping[str, str]  # by language


@dataclass(frozen=True, slots=True)
class _MetricEntry:
    """An entry of metrics.yaml: a ``name``, in which `<word>` stands for any text, its ``unit`` and its ``meaning``."""

    name: str
    unit: Texts
    meaning: Texts
    title: Texts  # title of its group
    pattern: re.Pattern[str]

    @property
    def letters(self) -> int:
        """How many characters of the name are no placeholder; of two matching entries that with more is chosen."""
        return len(_PLACEHOLDER.sub("", self.name))


@cache
def _read_entries() -> tuple[_MetricEntry, ...]:
    """Read metrics.yaml, once."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    table = yaml.load(PATH.read_text(encoding="utf-8"), loader)
    return tuple(
        _read_entry(name, raw, table["units"], group["title"])
        for group in table["groups"]
        for name, raw in group["metrics"].items()
    )


def _read_entry(name: str, raw: Mapping[str, str], units: Mapping[str, Texts], title: Texts) -> _MetricEntry:
    meaning = {language: raw[language] for language in LANGUAGES}
    pattern = re.compile(".+".join(map(re.escape, _PLACEHOLDER.split(name))))
    return _MetricEntry(name, units[raw["unit"]], meaning, title, pattern)


def _find_entry(name: str) -> tuple[_MetricEntry, str] | None:
    """Return the entry of a metric, and the prefix of its name: `eval`, a source, another model.

    None for a metric that is not Coalign's: users' hooks may add some.
    """
    if entry := _match(name, begins_open=False):
        return entry, ""
    first, _, rest = name.partition("/")
    if first == "eval":
        source, _, metric = rest.partition("/")
        if inner := _find_entry(rest):
            return inner[0], "/".join(filter(None, ("eval", inner[1])))
        entry = _match(f"eval/{metric}", begins_open=False) if metric else None
        return (entry, f"eval/{source}") if entry else None
    if entry := _match(name, begins_open=True):
        return entry, ""
    entry = _match(rest, begins_open=False)
    return (entry, first) if entry else None


def describe_metric(name: str) -> dict[str, str] | None:
    """Return one sentence and the unit, by language: `{"en": "Mean reward …. [reward]", …}`. None: see _find_entry."""
    match = _find_entry(name)
    if match is None:
        return None
    entry, prefix = match
    texts = {language: f"{entry.meaning[language]} [{entry.unit[language]}]" for language in LANGUAGES}
    return {language: f"{prefix}: {text}" if prefix else text for language, text in texts.items()}


def _match(name: str, *, begins_open: bool) -> _MetricEntry | None:
    """Return the matching entry with the most letters, among those that do or do not begin with a placeholder."""
    matches = [
        entry
        for entry in _read_entries()
        if entry.name.startswith("<") == begins_open and entry.pattern.fullmatch(name)
    ]
    return max(matches, key=lambda entry: entry.letters, default=None)
