"""Questions about the schema: the type of a key, the keys of a section, marks on fields."""

from __future__ import annotations

import types
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin

from coalign.config.errors import Key
from coalign.config.schema import ContinuationSetting, InputPath, NoEffect, OutputPath, RunConfig, Section


@cache
def find_type(key: Key, root: type[Section] = RunConfig) -> Any:
    """Find the annotation of ``key`` below the section ``root``; Any where the schema leaves it open."""
    kind: Any = root
    for part in key:
        kind = _inside(kind, part)
    return kind


def find_section(key: Key, root: type[Section] = RunConfig) -> type[Section] | None:
    """Find the section at ``key``. A list of sections counts as one, because a single item needs no brackets."""
    kind = unwrap_type(find_type(key, root))
    if get_origin(kind) is list:
        kind = unwrap_type(get_args(kind)[0])
    return kind if _is_section(kind) else None


def list_keys(key: Key, root: type[Section] = RunConfig) -> list[str]:
    """List the keys of the section at ``key``."""
    section = find_section(key, root)
    return list(section.model_fields) if section else []


def is_nullable(kind: Any) -> bool:
    """Whether null is a value of this type; elsewhere it means "not given"."""
    if _split_annotation(kind):
        return is_nullable(get_args(kind)[0])
    return kind is Any or type(None) in _alternatives(kind)


def unwrap_type(kind: Any) -> Any:
    """Remove ``Annotated`` and ``| None`` from a type."""
    if _split_annotation(kind):
        return unwrap_type(get_args(kind)[0])
    rest = [part for part in _alternatives(kind) if part is not type(None)]
    return unwrap_type(rest[0]) if len(rest) == 1 else kind


@cache
def find_input(key: Key, root: type[Section] = RunConfig) -> InputPath | None:
    """Find the InputPath mark of ``key``; None if it is no path that must exist."""
    kind = find_type(key, root)
    if get_origin(unwrap_type(kind)) is list:
        kind = get_args(unwrap_type(kind))[0]
    return next((mark for mark in _marks(kind) if isinstance(mark, InputPath)), None)


@cache
def is_path(key: Key, root: type[Section] = RunConfig) -> bool:
    """Whether ``key`` is a path, which a run reads or writes."""
    return any(isinstance(mark, InputPath | OutputPath) for mark in _marks(find_type(key, root)))


def list_marked(section: type[Section], mark: type) -> set[str]:
    """Collect the keys of a section that carry a mark, such as DrawSetting."""
    return {name for name, field in section.model_fields.items() if mark in map(type, field.metadata)}


@cache
def is_result_relevant(key: Key, root: type[Section] = RunConfig) -> bool:
    """Whether results depend on ``key``: neither it nor a section around it is marked NoEffect."""
    return not _has_mark(key, root, NoEffect)


@cache
def is_continuable(key: Key, root: type[Section] = RunConfig) -> bool:
    """Whether ``key`` may change when a run goes on: a ContinuationSetting, or a path whose contents are compared."""
    mark = find_input(key, root)
    compared = mark is not None and mark.kind in ("model", "data")
    return compared or _has_mark(key, root, ContinuationSetting)


def has_default(key: Key, value: Any, root: type[Section] = RunConfig) -> bool:
    """Whether ``value``, as JSON has it, is what the schema takes where ``key`` is not given."""
    section = find_section(key[:-1], root)
    field = section.model_fields.get(str(key[-1])) if section else None
    return field is not None and not field.is_required() and field.get_default(call_default_factory=True) == value


def _has_mark(key: Key, root: type[Section], kind: type) -> bool:
    around = (find_type(key[:depth], root) for depth in range(1, len(key) + 1))
    return any(isinstance(mark, kind) for part in around for mark in _marks(part))


def list_relevant_settings(settings: Section) -> Iterator[tuple[Key, Any]]:
    """Yield the key and the value, as JSON has it, of every setting that results depend on."""
    leaves = _iterate_leaves(settings.model_dump(mode="json"), ())
    return ((key, value) for key, value in leaves if is_result_relevant(key, type(settings)))


def _iterate_leaves(value: Any, key: Key) -> Iterator[tuple[Key, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not items:
        yield key, value
    for name, item in items:
        yield from _iterate_leaves(item, (*key, name))


def _inside(kind: Any, part: str | int) -> Any:
    kind = unwrap_type(kind)
    if _is_section(kind):
        field = kind.model_fields.get(part)
        if field is None:
            return Any
        return Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    if get_origin(kind) is dict:
        return get_args(kind)[1]
    if get_origin(kind) is list:
        return get_args(kind)[0] if isinstance(part, int) else _inside(get_args(kind)[0], part)
    return Any


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def _split_annotation(kind: Any) -> bool:
    return get_origin(kind) is Annotated


def _alternatives(kind: Any) -> tuple[Any, ...]:
    """The parts of a union; none for another type."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else ()


def _marks(kind: Any) -> tuple[Any, ...]:
    """What ``Annotated`` adds to a type, inside a union as well."""
    if _split_annotation(kind):
        return (*get_args(kind)[1:], *_marks(get_args(kind)[0]))
    return tuple(mark for part in _alternatives(kind) for mark in _marks(part))
