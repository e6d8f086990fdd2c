"""YAML text with the place of every value. Scalars follow YAML 1.2: 1e-6 is a number; yes, on and dates are texts.

Refuses duplicate keys, and aliases that contain themselves. A key with nothing behind it (``runtime:``) is not given;
write ``null`` to mean null.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from coalign.config.errors import ConfigError, ConfigLocation, ConfigProblem, Key

ConfigLocations = dict[Key, ConfigLocation]

_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_SCALARS = {  # first match wins
    "null": (re.compile(r"~|null|Null|NULL|"), "~nN"),
    "bool": (re.compile(r"true|True|TRUE|false|False|FALSE"), "tTfF"),
    "int": (re.compile(r"[-+]?[0-9][0-9_]*"), "-+0123456789"),
    "float": (_FLOAT, "-+.0123456789"),
}


class _Loader(yaml.SafeLoader):
    """Composes nodes; its own scalar rules instead of YAML 1.1's."""

    yaml_implicit_resolvers = {"<": [("tag:yaml.org,2002:merge", re.compile("<<$"))]}


class _Dumper(yaml.SafeDumper):
    """Quotes whatever YAML 1.1 or _Loader would read as something other than a text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """A text in one line: line breaks are escaped."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if "\n" in text else None)


_Dumper.add_representer(str, _text)
for _tag, (_pattern, _first) in _SCALARS.items():
    _whole = re.compile(rf"(?:{_pattern.pattern})$")
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _whole, [*_first, *([""] if _tag == "null" else [])])
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(rf"(?:{_FLOAT.pattern})$"), list("-+.0123456789"))


def parse(text: str, source: str) -> tuple[Any, ConfigLocations]:
    """The value of a YAML document, and where each of its keys was written. Raises ConfigError with file and line."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(
            [ConfigProblem((), f"not valid YAML: {error.problem}{_hint(error)}", _place(source, mark))]
        ) from error
    except yaml.reader.ReaderError as error:
        place = ConfigLocation(source, text.count("\n", 0, error.position) + 1)
        raise ConfigError([ConfigProblem((), f"not valid YAML: {error.reason}", place)]) from error
    reader = _Reader(loader, source)
    value = reader.value(node, ()) if node else None
    if reader.problems:
        raise ConfigError(reader.problems)
    return value, reader.places


def parse_scalar(text: str) -> Any:
    """A value as it would be read behind a key; text that is no YAML stays text (an environment variable's value)."""
    try:
        return parse(text, "")[0]
    except ConfigError:
        return text


def emit(value: Any, flow: bool | None = False) -> str:
    """The YAML of a value, keys in their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=flow)


class _Reader:
    """Turns nodes into values and writes down their places and what is wrong with them."""

    def __init__(self, loader: _Loader, source: str) -> None:
        self.loader, self.source = loader, source
        self.places: ConfigLocations = {}
        self.problems: list[ConfigProblem] = []
        self._open: set[int] = set()

    def value(self, node: yaml.Node, key: Key) -> Any:
        self.places.setdefault(key, _place(self.source, node.start_mark))
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, key)
        if id(node) in self._open:
            self.problems.append(
                ConfigProblem(key, "an alias that contains itself", _place(self.source, node.start_mark))
            )
            return None
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self.value(item, (*key, i)) for i, item in enumerate(node.value)]
            return self._mapping(node, key)
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, key: Key) -> dict[str, Any]:
        self._refuse_duplicates(node, key)
        self.loader.flatten_mapping(node)
        found = {}
        for name, item in node.value:
            path = (*key, str(name.value))
            self.places[path] = _place(self.source, name.start_mark)
            if not (isinstance(item, yaml.ScalarNode) and item.value == "" and item.style is None):
                found[path[-1]] = self.value(item, path)
        return found

    def _refuse_duplicates(self, node: yaml.MappingNode, key: Key) -> None:
        first: dict[str, yaml.Node] = {}
        for name, _ in node.value:
            if not isinstance(name, yaml.ScalarNode):
                self.problems.append(ConfigProblem(key, "a key must be a text", _place(self.source, name.start_mark)))
            elif name.value in first:
                line = first[name.value].start_mark.line + 1
                place = _place(self.source, name.start_mark)
                self.problems.append(ConfigProblem((*key, name.value), f"given twice, first in line {line}", place))
            else:
                first[name.value] = name

    def _scalar(self, node: yaml.ScalarNode, key: Key) -> Any:
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        if kind == "null":
            return None
        if kind == "bool":
            return node.value.lower() == "true"
        if kind == "int":
            return int(node.value.replace("_", ""))
        if kind == "float":
            return float(re.sub(r"\.(?=[infaINFA])", "", node.value.replace("_", "")))
        if kind != "str":
            self.problems.append(
                ConfigProblem(key, f"the tag {node.tag} is not supported", _place(self.source, node.start_mark))
            )
        return node.value


def _place(source: str, mark: yaml.Mark | None) -> ConfigLocation:
    return ConfigLocation(source, mark.line + 1, mark.column + 1) if mark else ConfigLocation(source)


def _hint(error: yaml.MarkedYAMLError) -> str:
    if "cannot start any token" in (error.problem or "") and "\\t" in error.problem:
        return " (indent with spaces, not tabs)"
    if "mapping values are not allowed" in (error.problem or ""):
        return " (a colon in a text needs quotes; or the line is indented wrongly)"
    return ""
