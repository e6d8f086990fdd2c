"""What the schema says about a key: the type that belongs there, and what else could be there."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Union, get_args, get_origin

from coalign.config.errors import Key
from coalign.config.schema import Input, RunConfig, Section


def type_at(key: Key) -> Any:
    """The annotation of the value at ``key`` of a run; Any where the schema leaves it open."""
    kind: Any = RunConfig
    for part in key:
        kind = _inside(kind, part)
    return kind


def section_at(key: Key) -> type[Section] | None:
    """The section that stands at ``key``, or None. A list of sections counts as one, its item may stand without brackets."""
    kind = bare(type_at(key))
    if get_origin(kind) is list:
        kind = bare(get_args(kind)[0])
    return kind if _is_section(kind) else None


def names_at(key: Key) -> list[str]:
    """The keys that the schema knows in the section at ``key``."""
    section = section_at(key)
    return list(section.model_fields) if section else []


def admits_null(kind: Any) -> bool:
    """Whether null is a value of this type (elsewhere it says: not given)."""
    return (
        kind is Any
        or type(None) in get_args(kind)
        or any(map(admits_null, get_args(kind)[:1] if _annotated(kind) else ()))
    )


def bare(kind: Any) -> Any:
    """The type without ``Annotated`` and without ``| None``."""
    if _annotated(kind):
        return bare(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        rest = [part for part in get_args(kind) if part is not type(None)]
        return bare(rest[0]) if len(rest) == 1 else kind
    return kind


def inputs(section: Section, key: Key = ()) -> Iterator[tuple[Key, str, Input]]:
    """Every given path in the configuration that must exist: (key, path, what it must be)."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        marks = [m for m in (*field.metadata, *_metadata(field.annotation)) if isinstance(m, Input)]
        if marks and value is not None:
            yield (*key, name), value, marks[0]
        yield from _nested(value, (*key, name))


def _nested(value: Any, key: Key) -> Iterator[tuple[Key, str, Input]]:
    if isinstance(value, Section):
        yield from inputs(value, key)
    elif isinstance(value, list | dict):
        for part, item in enumerate(value) if isinstance(value, list) else value.items():
            yield from _nested(item, (*key, part))


def _inside(kind: Any, part: str | int) -> Any:
    kind = bare(kind)
    if _is_section(kind):
        field = kind.model_fields.get(part)
        return Any if field is None else field.annotation
    if get_origin(kind) is dict:
        return get_args(kind)[1]
    if get_origin(kind) is list:
        return get_args(kind)[0] if isinstance(part, int) else _inside(get_args(kind)[0], part)
    return Any


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def _annotated(kind: Any) -> bool:
    return get_origin(kind) is Annotated


def _metadata(kind: Any) -> tuple[Any, ...]:
    """The marks on a type, also inside ``Annotated[…] | None``."""
    if _annotated(kind):
        return get_args(kind)[1:]
    if get_origin(kind) in (Union, types.UnionType):
        return tuple(mark for part in get_args(kind) for mark in _metadata(part))
    return ()
