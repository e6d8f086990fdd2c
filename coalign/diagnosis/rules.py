"""The causes that diagnosis knows: rules.yaml as checked records, and one expression that finds lines worth a look."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from re import _constants, _parser  # pyright: ignore[reportAttributeAccessIssue] (typeshed lacks them)
from typing import Any

import yaml

PATH = Path(__file__).with_name("rules.yaml")
LEVELS = ("certain", "likely", "possible")
SECONDARY = 90  # the order of rules that never name a cause
_LONG = 9  # a literal of so many characters is rare enough to look for it alone
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
    where = f"{PATH.name}: {raw.get('id')}"
    if unknown := raw.keys() - _KEYS:
        raise ValueError(f"{where}: no such key: {', '.join(sorted(unknown))}")
    if missing := {"id", "category", "title", "any", "order", "sure", "advice"} - raw.keys():
        raise ValueError(f"{where}: missing: {', '.join(sorted(missing))}")
    if raw["sure"] not in LEVELS:
        raise ValueError(f"{where}: sure: is {raw['sure']!r}; expected {', '.join(LEVELS)}")
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
    """Return an expression in RE2's syntax that matches every line which a rule could match, and few others.

    It is made of the literal texts of the patterns: long ones alone, short ones in pairs.
    """
    terms = {_filter_term(pattern.expression.pattern) for rule in load_rules() for pattern in rule.patterns}
    return "(?i)" + "|".join(sorted(terms))


def find_words(expression: str) -> frozenset[str]:
    """Return texts (lower case), one of which each match of the expression holds. ValueError if there are none."""
    found = max(_list_literals(_parser.parse(expression)), key=_score, default=None)
    if found is None or min(map(len, found)) < 3:
        raise ValueError(f"{PATH.name}: {expression!r} has no literal text of three characters that is always there")
    return frozenset(word.lower() for word in found)


def _filter_term(expression: str) -> str:
    literals = list(_list_literals(_parser.parse(expression)))
    best = max(literals, key=_score)
    pair = [best]
    if min(map(len, best)) < _LONG and len(literals) > 1:
        chosen = sorted(literals, key=_score)[-2:]
        pair = [each for each in literals if any(each is one for one in chosen)]
    return ".*".join(f"(?:{'|'.join(sorted(re.escape(word.lower()) for word in words))})" for words in pair)


def _score(words: set[str]) -> float:
    return min(map(len, words)) - 0.01 * len(words)


def _list_literals(items: Any) -> Iterator[set[str]]:
    """Yield, in the order of a parsed expression, sets of texts: a match holds one text of each set."""
    run = ""
    for kind, value in [*items, (None, None)]:
        if kind is _constants.LITERAL:
            run += chr(value)
            continue
        if run:
            yield {run}
        run = ""
        if kind is _constants.SUBPATTERN:
            yield from _list_literals(value[3])
        elif kind is _constants.BRANCH:
            branches = [max(_list_literals(branch), key=_score, default=None) for branch in value[1]]
            if all(branches):
                yield set().union(*(branch for branch in branches if branch))
        elif kind in (_constants.MAX_REPEAT, _constants.MIN_REPEAT) and value[0] >= 1:
            yield from _list_literals(value[2])
