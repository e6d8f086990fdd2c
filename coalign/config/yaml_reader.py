"""Parses YAML with the location of every value. Scalars follow YAML 1.2: 1e-6 is a number; yes, on and dates are texts.

Duplicate keys and aliases that contain themselves are refused, and so are files that would take for ever: large ones,
deep ones, and aliases of aliases. A key without a value (``runtime:``) is not given; ``null`` means null.

It builds on PyYAML's nodes, which carry their positions. `ruamel.yaml` would not replace this module: it reports only
the first duplicate key, accepts self-containing aliases and unknown tags, reads dates and hexadecimal numbers, and does
not distinguish a missing value from null.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

import yaml

from coalign.config.errors import ConfigError, ConfigLocation, ConfigProblem, Key, format_value

ConfigLocations = dict[Key, ConfigLocation]

_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_SCALARS = {  # first match wins
    "null": (re.compile(r"~|null|Null|NULL|"), "~nN"),
    "bool": (re.compile(r"true|True|TRUE|false|False|FALSE"), "tTfF"),
    "int": (re.compile(r"[-+]?[0-9][0-9_]*"), "-+0123456789"),
    "float": (_FLOAT, "-+.0123456789"),
}

_COLLECTIONS = ("tag:yaml.org,2002:seq", "tag:yaml.org,2002:map")
MAX_BYTES, MAX_VALUES, MAX_DEPTH, MAX_DIGITS = 4 * 2**20, 100_000, 50, 100


class _Loader(yaml.SafeLoader):
    """Composes nodes, with the scalar rules above instead of those of YAML 1.1."""

    yaml_implicit_resolvers = {"<": [("tag:yaml.org,2002:merge", re.compile("<<$"))]}

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._level = 0
        self._extents: dict[int, tuple[int, int]] = {}  # by node: its values and its depth, with aliases expanded

    def compose_node(self, parent: Any, index: Any) -> Any:
        mark = cast(Any, self).peek_event().start_mark
        self._level += 1
        self._refuse_large(mark, 0, self._level)
        node: Any = super().compose_node(parent, index)
        self._level -= 1
        if id(node) not in self._extents:
            children = [] if isinstance(node, yaml.ScalarNode) else node.value
            if isinstance(node, yaml.MappingNode):
                children = [child for pair in children for child in pair]
            extents = [self._extents.get(id(child), (1, 1)) for child in children]
            values = 1 + sum(count for count, _ in extents)
            depth = 1 + max((depth for _, depth in extents), default=0)
            self._refuse_large(mark, values, depth)
            self._extents[id(node)] = values, depth
        return node

    def _refuse_large(self, mark: Any, values: int, depth: int) -> None:
        if values > MAX_VALUES:
            raise yaml.MarkedYAMLError(None, None, f"over {MAX_VALUES} values, with aliases written out", mark)
        if depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(None, None, f"over {MAX_DEPTH} levels of lists and mappings", mark)


class _Dumper(yaml.SafeDumper):
    """Quotes texts that YAML 1.1 or _Loader would read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Represent a text in one line; line breaks (U+0085 is one in YAML 1.1) and controls are escaped."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _text)
for _tag, (_pattern, _first) in _SCALARS.items():
    _anchored = re.compile(rf"(?:{_pattern.pattern})$")
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _anchored, [*_first, *([""] if _tag == "null" else [])])
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(rf"(?:{_FLOAT.pattern})$"), list("-+.0123456789"))


def parse(text: str, source: str) -> tuple[Any, ConfigLocations]:
    """Return the value of a YAML document and the locations of its keys. ConfigError with file and line."""
    if len(text) > MAX_BYTES:
        raise ConfigError(
            [ConfigProblem((), f"is too long: {len(text)} characters, over {MAX_BYTES}", ConfigLocation(source))]
        )
    if match := re.search("[\x85\u2028\u2029]", text):  # PyYAML would fold texts there, and count lines wrongly
        code = f"{ord(match[0]):04X}"
        message = f'holds the character U+{code}, which ends a line in YAML 1.1; write "\\u{code}" in double quotes'
        location = ConfigLocation(source, text.count("\n", 0, match.start()) + 1)
        raise ConfigError([ConfigProblem((), f"not valid YAML: {message}, or remove it", location)])
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(
            [ConfigProblem((), f"not valid YAML: {error.problem}{_hint(error)}", _locate(source, mark))]
        ) from error
    except yaml.reader.ReaderError as error:
        location = ConfigLocation(source, text.count("\n", 0, error.position) + 1)
        raise ConfigError([ConfigProblem((), f"not valid YAML: {error.reason}", location)]) from error
    except (ValueError, OverflowError) as error:  # PyYAML's own: a character or a version that cannot be
        raise ConfigError([ConfigProblem((), f"not valid YAML: {error}", ConfigLocation(source))]) from error
    reader = _Reader(loader, source)
    try:
        value = reader.value(node, ()) if node else None
    except yaml.MarkedYAMLError as error:  # a merge of what is no mapping
        raise ConfigError(
            [ConfigProblem((), f"not valid YAML: {error.problem}", _locate(source, error.problem_mark))]
        ) from error
    if reader.problems:
        raise ConfigError(reader.problems)
    return value, reader.locations


def parse_scalar(text: str) -> Any:
    """Parse the value of an environment variable as YAML; invalid YAML stays a text."""
    try:
        return parse(text, "")[0]
    except ConfigError:
        return text


def flatten(content: Any, key: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Yield the settings of a configuration: each key with its value, which is no mapping and no list of such."""
    if isinstance(content, Mapping) and content:
        for name, value in content.items():
            yield from flatten(value, (*key, str(name)))
    elif isinstance(content, list | tuple) and any(isinstance(item, Mapping | list | tuple) for item in content):
        for number, value in enumerate(content):
            yield from flatten(value, (*key, number))
    else:
        yield key, content


def emit(value: Any, flow: bool | None = False) -> str:
    """Write a value as YAML; keys keep their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=flow)


class _Reader:
    """Converts nodes to values, and collects their locations and problems."""

    def __init__(self, loader: _Loader, source: str) -> None:
        self.loader, self.source = loader, source
        self.locations: ConfigLocations = {}
        self.problems: list[ConfigProblem] = []
        self._open: set[int] = set()

    def value(self, node: yaml.Node, key: Key) -> Any:
        self.locations.setdefault(key, _locate(self.source, node.start_mark))
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, key)
        if id(node) in self._open:
            self.problems.append(
                ConfigProblem(key, "an alias that contains itself", _locate(self.source, node.start_mark))
            )
            return None
        self._open.add(id(node))
        try:
            if node.tag not in _COLLECTIONS:
                location = _locate(self.source, node.start_mark)
                self.problems.append(ConfigProblem(key, f"the tag {node.tag} is not supported", location))
                return None
            if isinstance(node, yaml.SequenceNode):
                return [self.value(item, (*key, i)) for i, item in enumerate(node.value)]
            assert isinstance(node, yaml.MappingNode)  # the third type of node
            return self._mapping(node, key)
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, key: Key) -> dict[str, Any]:
        self._refuse_duplicates(node, key)
        self.loader.flatten_mapping(node)
        mapping = {}
        for name, item in node.value:
            path = (*key, str(name.value))
            self.locations[path] = _locate(self.source, name.start_mark)
            if not (isinstance(item, yaml.ScalarNode) and item.value == "" and item.style is None):
                mapping[path[-1]] = self.value(item, path)
        return mapping

    def _refuse_duplicates(self, node: yaml.MappingNode, key: Key) -> None:
        first: dict[str, yaml.Node] = {}
        for name, _ in node.value:
            if not isinstance(name, yaml.ScalarNode):
                self.problems.append(ConfigProblem(key, "a key must be a text", _locate(self.source, name.start_mark)))
            elif name.value in first:
                line = first[name.value].start_mark.line + 1
                location = _locate(self.source, name.start_mark)
                self.problems.append(ConfigProblem((*key, name.value), f"given twice, first in line {line}", location))
            else:
                first[name.value] = name

    def _scalar(self, node: yaml.ScalarNode, key: Key) -> Any:
        scalar_type = node.tag.removeprefix("tag:yaml.org,2002:")
        if scalar_type == "null":
            return None
        if scalar_type == "bool":
            return node.value.lower() == "true"
        if scalar_type in ("int", "float"):
            digits = node.value.replace("_", "")
            if len(digits) > MAX_DIGITS or not _SCALARS[scalar_type][0].fullmatch(node.value):  # `!!int x`
                location = _locate(self.source, node.start_mark)
                self.problems.append(
                    ConfigProblem(key, f"{format_value(node.value)} is no {scalar_type} that can be read", location)
                )
                return None
            return int(digits) if scalar_type == "int" else float(re.sub(r"\.(?=[infaINFA])", "", digits))
        if scalar_type != "str":
            self.problems.append(
                ConfigProblem(key, f"the tag {node.tag} is not supported", _locate(self.source, node.start_mark))
            )
        return node.value


def _locate(source: str, mark: yaml.Mark | None) -> ConfigLocation:
    return ConfigLocation(source, mark.line + 1, mark.column + 1) if mark else ConfigLocation(source)


def _hint(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or ""
    if "cannot start any token" in problem and "\\t" in problem:
        return " (indent with spaces, not tabs)"
    if "mapping values are not allowed" in problem:
        return " (a colon in a text needs quotes; or the line is indented wrongly)"
    return ""


def emit_inline(value: Any) -> str:
    """Write a value as YAML in one line."""
    lines = emit(value, flow=True).removesuffix("\n").removesuffix("\n...").splitlines()
    return " ".join(line.strip() for line in lines)
