"""Changes single values in the text of a YAML file. Everything else, comments too, stays as it is written.

PyYAML keeps the positions of its nodes, though not the comments: a value is replaced where it stands, and a new key is
added to its mapping.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from coalign.config.yaml_reader import emit_inline


def edit_yaml(text: str, source: str, changes: Mapping[str, Any]) -> str:
    """Return the text with other values of dotted keys; None removes nothing, it is written as null.

    Raises ValueError where a key's mapping is an alias or a merge, whose text says more than one thing.
    """
    for key, value in changes.items():
        text = _set(text, source, key.split("."), value)
    return text


def _set(text: str, source: str, path: list[str], value: Any) -> str:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        raise ValueError(f"{source}: expected keys with values, like `algorithm: grpo`")
    node: yaml.MappingNode = root
    for depth, name in enumerate(path):
        entry = next(((key, inner) for key, inner in node.value if key.value == name), None)
        if entry is None:
            return _add(text, node, path[depth:], value)
        key, inner = entry
        if (
            text[key.end_mark.index : inner.start_mark.index].strip(" :\n")
            or inner.start_mark.index < key.end_mark.index
        ):
            raise ValueError(f"{source}:{key.start_mark.line + 1}: {'.'.join(path)} is an alias; write its keys there")
        if depth == len(path) - 1 or not isinstance(inner, yaml.MappingNode):
            return _replace(text, key, inner, _nest(value, path[depth + 1 :]))
        node = inner
    return text


def _replace(text: str, key: yaml.Node, old: yaml.Node, value: Any) -> str:
    """Replace a value by another one; an empty one stands right behind its key."""
    start, end = old.start_mark.index, old.end_mark.index
    if start == end:
        colon = text.index(":", key.end_mark.index)
        return f"{text[: colon + 1]} {emit_inline(value)}{text[colon + 1 :]}"
    if isinstance(old, yaml.CollectionNode) and not old.flow_style:  # a block: it begins on its own line
        start = text.index(":", key.end_mark.index) + 1
        end = _find_end(old)
        return f"{text[:start]} {emit_inline(value)}{text[end:]}"
    return text[:start] + emit_inline(value) + text[end:]


def _add(text: str, node: yaml.MappingNode, path: list[str], value: Any) -> str:
    """Add a key at the end of a mapping, with the mappings on the way to it."""
    entry = f"{path[0]}: {emit_inline(_nest(value, path[1:]))}"
    if node.flow_style:
        close = node.end_mark.index - 1
        head = text[:close].rstrip()
        separator = "" if head.endswith("{") else ", "
        return f"{head}{separator}{entry}{text[close:]}"
    line = f"{' ' * node.start_mark.column}{entry}\n"
    end = max(map(_find_end, node.value[-1]))
    stop = text.find("\n", end)  # behind a comment on the last line
    if stop < 0:
        return f"{text}\n{line}"
    return text[: stop + 1] + line + text[stop + 1 :]


def _nest(value: Any, path: list[str]) -> Any:
    for name in reversed(path):
        value = {name: value}
    return value


def _find_end(node: yaml.Node) -> int:
    """Return where the last value in a node ends; the mark of a block is behind the comments that follow it."""
    if isinstance(node, yaml.MappingNode) and not node.flow_style and node.value:
        return max(map(_find_end, node.value[-1]))
    if isinstance(node, yaml.SequenceNode) and not node.flow_style and node.value:
        return _find_end(node.value[-1])
    return node.end_mark.index
