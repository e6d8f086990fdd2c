"""The causes that diagnosis knows: rules.yaml as checked records, and one expression that finds lines worth a look."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from re import _constants, _parser  # pyright: ignore[reportAttributeAccessIssue] (typeshed lacks them)
from typing import Any

import yaml

PATH = Path(__file__).with_name("rules.yaml")
LEVELS = ("certain", "likely", "possible")
SECONDARY = 90  # the order of rules that never name a cause
_CUT = 8  # characters at the beginning of a text that are looked for
_MAX_TEXTS = 64  # alternatives that are kept apart
# What lines of healthy runs are full of: better texts are looked for.
_COMMON = {
    *(
        "error",
        "loss",
        "step",
        "steps",
        "reward",
        "grad",
        "data",
        "samples",
        "rows",
        "model",
        "tokens",
        "token",
        "length",
    ),
    *(
        "timeout",
        "worker",
        "found",
        "exit",
        "node",
        "failed",
        "weight",
        "world",
        "only",
        "http",
        "rank",
        "warning",
        "info",
    ),
    *(
        "train",
        "worker ",
        "dataset",
        "checkpoint",
        "batch",
        "size",
        "rate",
        "step ",
        "input",
        "output",
        "prompt",
        "value",
    ),
    *("cuda", "device", "memory", "process", "file", "line", "time", "missing", "invalid", "sandbox", "service"),
}
_KEYS = {"id", "category", "title", "details", "any", "unless", "all", "not", "fields", "frames"} | {
    *("order", "sure", "level", "advice", "coalign")
}


@dataclass(frozen=True)
class LinePattern:
    """An expression of a rule. ``words``: lower-case texts, one of which each line that it matches holds."""

    expression: re.Pattern[str]
    words: frozenset[str]


@dataclass(frozen=True)
class CauseRule:
    """A cause, how its lines look, and what to do. The keys are those of rules.yaml, where they are explained."""

    id: str
    category: str
    title: str
    advice: str
    order: int
    sure: str
    patterns: tuple[LinePattern, ...]
    unless: tuple[re.Pattern[str], ...] = ()
    all: tuple[re.Pattern[str], ...] = ()
    none: tuple[re.Pattern[str], ...] = ()
    fields: tuple[re.Pattern[str], ...] = ()
    frames: re.Pattern[str] | None = None
    details: tuple[str, ...] = ()
    settings: str = ""
    takes_warnings: bool = False
    is_lasting: bool = False  # counts although steps follow, if the last one shows it, too

    @property
    def tier(self) -> int:
        """The order, where all that may be the first cause is alike: there the earliest counts."""
        if self.order < 30:
            return 10 if self.order < 15 else 20
        return 35 if 34 <= self.order < 40 else self.order

    def describe(self, fields: Mapping[str, str]) -> str:
        """Return the title with those details whose groups were found."""
        shown = [text.format(**fields) for text in self.details if set(re.findall(r"{(\w+)}", text)) <= fields.keys()]
        return f"{self.title} ({', '.join(dict.fromkeys(shown))})" if shown else self.title


def read_rule(raw: Mapping[str, Any]) -> CauseRule:
    """Check and compile a rule of the file. Raises ValueError, naming rule and key."""
    rule_name = f"{PATH.name}: {raw.get('id')}"
    if unknown := raw.keys() - _KEYS:
        raise ValueError(f"{rule_name}: no such key: {', '.join(sorted(unknown))}")
    if missing := {"id", "category", "title", "any", "order", "sure", "advice"} - raw.keys():
        raise ValueError(f"{rule_name}: missing: {', '.join(sorted(missing))}")
    if raw["sure"] not in LEVELS:
        raise ValueError(f"{rule_name}: sure: is {raw['sure']!r}; expected {', '.join(LEVELS)}")
    several = {key: tuple(re.compile(text) for text in raw.get(key, ())) for key in ("unless", "all", "not", "fields")}
    return CauseRule(
        **{key: raw[key] for key in ("id", "category", "title", "advice", "order", "sure")},
        patterns=tuple(LinePattern(re.compile(text), find_words(text)) for text in raw["any"]),
        unless=several["unless"],
        all=several["all"],
        none=several["not"],
        fields=several["fields"],
        frames=re.compile(raw["frames"]) if "frames" in raw else None,
        details=tuple(raw.get("details", ())),
        settings=raw.get("coalign", ""),
        takes_warnings=raw.get("level") == "warning",
        is_lasting=raw.get("level") == "lasting",
    )


@cache
def load_rules() -> tuple[CauseRule, ...]:
    """Read rules.yaml, once."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    rules = tuple(read_rule(raw) for raw in yaml.load(PATH.read_text(encoding="utf-8"), loader))
    if len({rule.id for rule in rules}) < len(rules):
        raise ValueError(f"{PATH.name}: an id is there twice")
    return rules


def find_rule(name: str) -> CauseRule:
    return next(rule for rule in load_rules() if rule.id == name)


@cache
def build_filter() -> str:
    """Return an expression in RE2's syntax that matches, in lower case, every line that a rule could match.

    Beginnings of literal texts alone keep RE2's automaton small, and so at the speed of memory.
    """
    words = {word[:_CUT] for rule in load_rules() for pattern in rule.patterns for word in pattern.words}
    needed = {word for word in words if not any(shorter != word and shorter in word for shorter in words)}
    return "|".join(sorted(re.escape(word) for word in needed))


def find_words(expression: str) -> frozenset[str]:
    """Return texts (lower case), one of which each match of the expression holds. ValueError if there are none."""
    exact, best = _find_literals(_parser.parse(expression))
    words = max((texts for texts in (exact, best) if texts), key=_score, default=frozenset())
    if not words or min(map(len, words)) < 3:
        raise ValueError(f"{PATH.name}: {expression!r} has no literal text of three characters that is always there")
    return words


def _score(words: frozenset[str]) -> float:
    """Return how rare lines with one of the texts are."""
    return min(1.0 if word.strip(" :=.") in _COMMON else len(word) for word in words) - 0.005 * len(words)


def _find_literals(items: Any) -> tuple[frozenset[str] | None, frozenset[str] | None]:
    """Return all texts that a parsed expression matches (None: too many), and texts one of which a match holds."""
    exact, current, best = True, frozenset({""}), None

    def offer(words: frozenset[str] | None) -> None:
        nonlocal best
        if words and all(words) and (best is None or _score(words) > _score(best)):
            best = words

    for item in items:
        all_texts, needed = _find_item_literals(*item)
        if all_texts is not None and len(current) * len(all_texts) <= _MAX_TEXTS:
            current = frozenset(prefix + suffix for prefix in current for suffix in all_texts)
            continue
        offer(current)
        offer(needed if all_texts is None else all_texts)
        exact, current = False, frozenset({""})
    offer(current)
    return (current if exact else None), best


def _find_item_literals(opcode: Any, value: Any) -> tuple[frozenset[str] | None, frozenset[str] | None]:
    if opcode is _constants.LITERAL:
        return frozenset({chr(value).lower()}), None
    if opcode is _constants.AT:
        return frozenset({""}), None
    if opcode is _constants.SUBPATTERN:
        return _find_literals(value[3])
    if opcode is _constants.IN and all(opcode_of_item is _constants.LITERAL for opcode_of_item, _ in value):
        return frozenset(chr(code).lower() for _, code in value), None
    if opcode is _constants.BRANCH:
        branches = [_find_literals(branch) for branch in value[1]]
        exact = [texts for texts, _ in branches if texts is not None]
        needed = [max((words for words in pair if words and all(words)), key=_score, default=None) for pair in branches]
        return (
            frozenset().union(*exact) if len(exact) == len(branches) else None,
            frozenset().union(*(words for words in needed if words)) if all(needed) else None,
        )
    if opcode in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
        texts, needed = _find_literals(value[2])
        if value[:2] == (0, 1) and texts is not None:
            return texts | {""}, None
        return None, max((words for words in (texts, needed) if words and all(words)), key=_score, default=None) if (
            value[0] >= 1
        ) else None
    return None, None
