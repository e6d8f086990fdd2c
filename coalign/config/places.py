"""Where each key of a configuration was written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from coalign.config.errors import ConfigError, ConfigLocation, Key, Problem

if TYPE_CHECKING:
    from coalign.config.schema import RunConfig


class Places:
    """Key -> ConfigLocation. Two of them are always equal: where a value was written is not part of the value."""

    def __init__(self, known: Mapping[Key, ConfigLocation]) -> None:
        self._known = dict(known)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Places)

    __hash__ = None

    def put(self, key: Key, place: ConfigLocation) -> None:
        """``key`` was written at ``place``."""
        self._known[key] = place

    def lay(self, over: Places) -> None:
        """Take the places of a layer above; its keys replace ours."""
        self._known |= over._known

    def forget(self, key: Key) -> None:
        """Drop what is below ``key`` (the value was replaced as a whole)."""
        self._known = {k: place for k, place in self._known.items() if k[: len(key)] != key or k == key}

    def inherit(self, source: Key, target: Key) -> None:
        """What ``target`` does not give itself was written at ``source``."""
        for key, place in list(self._known.items()):
            if key[: len(source)] == source and key != source:
                self._known.setdefault(target + key[len(source) :], place)

    def below(self, key: Key) -> Places:
        """The places of what is below ``key``, seen from there."""
        return Places({k[len(key) :]: place for k, place in self._known.items() if k[: len(key)] == key})

    def find(self, key: Key) -> ConfigLocation | None:
        """The place of ``key``, or of the nearest section around it. A list's only item may stand without brackets."""
        while key:
            for candidate in (key, tuple(part for part in key if part != 0)):
                if candidate in self._known:
                    return self._known[candidate]
            key = key[:-1]
        return None

    def on(self, problem: Problem) -> Problem:
        """The problem with its place, if it has none yet."""
        return problem if problem.place else replace(problem, place=self.find(problem.key))


@contextmanager
def located(config: RunConfig) -> Iterator[None]:
    """Add file and line to a ConfigError that rises inside (from ``functions.bind``, say)."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(config.places.on(problem) for problem in error.problems) from error.__cause__
