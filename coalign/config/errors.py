"""Problems of a configuration, with the file and line of each. It knows neither schema nor YAML."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from coalign.config.secrets import hide_secrets

if TYPE_CHECKING:
    from coalign.config.schema import RunConfig


Key = tuple[str | int, ...]  # ("data", "train", 0, "path") is data.train[0].path


@dataclass(frozen=True, slots=True)
class ConfigLocation:
    """The origin of a value: a file with line and column (from 1), an override, or a recipe's defaults."""

    source: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """One problem: its key, a message that says what to do, and its place if known."""

    key: Key
    message: str
    place: ConfigLocation | None = None

    def __str__(self) -> str:
        return ": ".join(part for part in (str(self.place or ""), format_key(self.key), self.message) if part)


class ConfigError(ValueError):
    """An unusable configuration. Its text has one line per problem; ``problems`` holds them, without secrets."""

    def __init__(self, problems: Iterable[ConfigProblem]) -> None:
        self.problems = tuple(replace(problem, message=hide_secrets(problem.message)) for problem in problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "\n".join(map(str, self.problems))


class Conflict(ValueError):
    """Raised by a section's validator: ``key`` (relative to the section) contradicts the rest of it."""

    def __init__(self, key: Key, message: str) -> None:
        super().__init__(key, message)
        self.key, self.message = key, message


def format_key(key: Key) -> str:
    """Format a key as users write it: ``data.train[0].path``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key).removeprefix(".")


def parse_key(text: str) -> Key:
    """Parse a key as users write it: ``data.train[0].path`` or ``data.train.0.path``."""
    parts = re.findall(r"[^.\[\]]+", text)
    return tuple(int(part) if part.isdecimal() and len(part) < 10 else part for part in parts)


def suggest(name: str, names: Iterable[str], limit: int = 12) -> str:
    """Correct an unknown ``name``, as the end of a sentence: the nearest of ``names``, or else all of them."""
    names = list(names)
    if nearest := find_nearest(name, names):
        return f"; did you mean '{nearest}'?"
    if not names:
        return ""
    return "; there are: " + ", ".join(names[:limit]) + (", …" if len(names) > limit else "")


def find_nearest(name: str, names: Iterable[str], similarity: float = 0.6) -> str | None:
    """Find the one of ``names`` that is spelled most like ``name``, or None; case does not count."""
    by_lower = {n.lower(): n for n in names}
    match = difflib.get_close_matches(str(name).lower(), by_lower, n=1, cutoff=similarity)
    return by_lower[match[0]] if match else None


_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "finite_number": "a finite number",
}
_LIMITS = {"greater_than": ("gt", "above"), "greater_than_equal": ("ge", "of at least")}
_LIMITS |= {"less_than": ("lt", "below"), "less_than_equal": ("le", "of at most")}


def describe_error(error: Any) -> str:
    """Describe a pydantic error (an entry of ``ValidationError.errors()``): the value, and what was expected."""
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind in ("missing", "missing_tuple"):
        return "missing"
    if kind == "value_error":
        cause = context["error"]
        return cause.message if isinstance(cause, Conflict) else str(cause)
    if kind == "literal_error":
        options = re.findall(r"'([^']*)'", context["expected"])
        nearest = find_nearest(str(value), options)
        correction = f"; did you mean '{nearest}'?" if nearest else ""
        return f"is {format_value(value)}; expected {' | '.join(options)}{correction}"
    if kind in _LIMITS:
        name, words = _LIMITS[kind]
        return f"is {format_value(value)}; expected a number {words} {context[name]:g}"
    if kind in ("too_long", "too_short"):
        length = context.get("max_length", context.get("min_length"))
        return f"is {format_value(value)}; expected a list of {length}"
    if kind in _EXPECTED:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        quoted = f" (in quotes: '{value}')" if kind == "string_type" and is_number else ""
        empty = "; `{}` takes all defaults" if kind == "model_type" and value is True else ""
        return f"is {format_value(value)}; expected {_EXPECTED[kind]}{quoted}{empty}"
    return f"is {format_value(value)}; {error['msg'][0].lower()}{error['msg'][1:]}"


def format_value(value: Any) -> str:
    """Format a value as YAML does, without secrets, shortened to 60 characters."""
    words, value = {None: "null", True: "true", False: "false"}, hide_secrets(value)
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:59] + "…"


class KeyLocations:
    """Where each key was written. Two of them always compare equal, so that equal configurations do."""

    def __init__(self, known: Mapping[Key, ConfigLocation]) -> None:
        self._known = dict(known)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeyLocations)

    __hash__ = None  # pyright: ignore[reportAssignmentType] (the way to declare a class unhashable)

    @property
    def sources(self) -> list[str]:
        """The files, overrides and defaults in which keys were written, each once."""
        return list(dict.fromkeys(place.source for place in self._known.values()))

    def put(self, key: Key, place: ConfigLocation) -> None:
        """Record that ``key`` was written at ``place``."""
        self._known[key] = place

    def lay(self, over: KeyLocations) -> None:
        """Add the places of a layer above; they replace ours."""
        self._known |= over._known

    def forget(self, key: Key) -> None:
        """Drop the places below ``key``, whose value was replaced as a whole."""
        self._known = {k: place for k, place in self._known.items() if k[: len(key)] != key or k == key}

    def inherit(self, source: Key, target: Key) -> None:
        """Give ``target`` the places of ``source`` for all keys that it has none for."""
        for key, place in list(self._known.items()):
            if key[: len(source)] == source and key != source:
                self._known.setdefault(target + key[len(source) :], place)

    def below(self, key: Key) -> KeyLocations:
        """Return the places below ``key``, relative to it."""
        return KeyLocations({k[len(key) :]: place for k, place in self._known.items() if k[: len(key)] == key})

    def find(self, key: Key) -> ConfigLocation | None:
        """Find the place of ``key`` or of the nearest section around it. A single list item may lack its index."""
        while key:
            for candidate in (key, tuple(part for part in key if part != 0)):
                if candidate in self._known:
                    return self._known[candidate]
            key = key[:-1]
        return None

    def on(self, problem: ConfigProblem) -> ConfigProblem:
        """Add the place to a problem that has none."""
        return problem if problem.place else replace(problem, place=self.find(problem.key))


@contextmanager
def locate_problems(config: RunConfig) -> Iterator[None]:
    """Add file and line to a ConfigError from inside (such as one of ``functions.bind``)."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(config.places.on(problem) for problem in error.problems) from error.__cause__


@contextmanager
def located_at(*key: str | int) -> Iterator[None]:
    """Give the key of a setting to a ValueError or OSError from inside, such as that of a name that does not exist.

    Any other error comes from code that the setting names, and keeps its traceback; a note names the key.
    """
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, OSError) as error:
        raise ConfigError([ConfigProblem(key, str(error))]) from error
    except Exception as error:
        error.add_note(f"  named by {format_key(key)}")
        raise
