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
    """One problem: its key, a message that says what to do, and its location if known."""

    key: Key
    message: str
    location: ConfigLocation | None = None

    def __str__(self) -> str:
        return ": ".join(filter(None, (str(self.location or ""), format_key(self.key), self.message)))


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
    return "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in key).removeprefix(".")


def parse_key(text: str) -> Key:
    """Parse a key as users write it: ``data.train[0].path`` or ``data.train.0.path``."""
    names = re.findall(r"[^.\[\]]+", text)
    return tuple(int(name) if name.isdecimal() and len(name) < 10 else name for name in names)


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
    error_type, value, context = error["type"], error["input"], error.get("ctx", {})
    if error_type in ("missing", "missing_tuple"):
        return "missing"
    if error_type == "value_error":
        cause = context["error"]
        return cause.message if isinstance(cause, Conflict) else str(cause)
    if error_type == "literal_error":
        options = re.findall(r"'([^']*)'", context["expected"])
        nearest = find_nearest(str(value), options)
        correction = f"; did you mean '{nearest}'?" if nearest else ""
        return f"is {format_value(value)}; expected {' | '.join(options)}{correction}"
    if error_type in _LIMITS:
        name, words = _LIMITS[error_type]
        return f"is {format_value(value)}; expected a number {words} {context[name]:g}"
    if error_type in ("too_long", "too_short"):
        length = context.get("max_length", context.get("min_length"))
        return f"is {format_value(value)}; expected a list of {length}"
    if error_type in _EXPECTED:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        quoted = f" (in quotes: '{value}')" if error_type == "string_type" and is_number else ""
        empty = "; `{}` takes all defaults" if error_type == "model_type" and value is True else ""
        return f"is {format_value(value)}; expected {_EXPECTED[error_type]}{quoted}{empty}"
    return f"is {format_value(value)}; {error['msg'][0].lower()}{error['msg'][1:]}"


def format_value(value: Any) -> str:
    """Format a value as YAML does, without secrets, shortened to 60 characters."""
    words, value = {None: "null", True: "true", False: "false"}, hide_secrets(value)
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:59] + "…"


class KeyLocations:
    """The location of each key. Two instances always compare equal, so that equal configurations do."""

    def __init__(self, locations: Mapping[Key, ConfigLocation]) -> None:
        self._locations = dict(locations)
        self._inherited: set[Key] = set()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeyLocations)

    __hash__ = None  # pyright: ignore[reportAssignmentType] (the way to declare a class unhashable)

    @property
    def sources(self) -> list[str]:
        """The files, overrides and defaults in which keys were written, each once."""
        return list(dict.fromkeys(location.source for location in self._locations.values()))

    def put(self, key: Key, location: ConfigLocation) -> None:
        """Record that ``key`` was written at ``location``."""
        self._locations[key] = location

    def lay(self, over: KeyLocations) -> None:
        """Add the locations of the layer above; they replace the present ones."""
        self._locations |= over._locations

    def forget(self, key: Key) -> None:
        """Drop the locations below ``key``, whose value was replaced."""
        self._locations = {k: location for k, location in self._locations.items() if k[: len(key)] != key or k == key}

    def inherit(self, source: Key, target: Key) -> None:
        """Give ``target`` the locations of ``source`` for all keys that it has none for."""
        for key, location in list(self._locations.items()):
            inherited = target + key[len(source) :]
            if key[: len(source)] == source and key != source and inherited not in self._locations:
                self._locations[inherited] = location
                self._inherited.add(inherited)

    def is_written(self, key: Key) -> bool:
        """Whether ``key`` itself was written, and neither left out nor inherited."""
        return key in self._locations and key not in self._inherited

    def below(self, key: Key) -> KeyLocations:
        """Return the locations below ``key``, relative to it."""
        return KeyLocations({k[len(key) :]: at for k, at in self._locations.items() if k[: len(key)] == key})

    def find(self, key: Key) -> ConfigLocation | None:
        """Find the location of ``key`` or of the nearest section around it. A single list item may lack its index."""
        while key:
            for candidate in (key, tuple(name for name in key if name != 0)):
                if candidate in self._locations:
                    return self._locations[candidate]
            key = key[:-1]
        return None

    def on(self, problem: ConfigProblem) -> ConfigProblem:
        """Add the location to a problem that has none."""
        return problem if problem.location else replace(problem, location=self.find(problem.key))


@contextmanager
def locate_problems(config: RunConfig) -> Iterator[None]:
    """Add file and line to a ConfigError from inside (such as one of ``functions.bind``)."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(config.locations.on(problem) for problem in error.problems) from error.__cause__


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
