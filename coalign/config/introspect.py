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
    annotation: Any = root
    for name in key:
        annotation = _inside(annotation, name)
    return annotation


def find_section(key: Key, root: type[Section] = RunConfig) -> type[Section] | None:
    """Find the section at ``key``. A list of sections counts as one, because a single item needs no brackets."""
    annotation = unwrap_type(find_type(key, root))
    if get_origin(annotation) is list:
        annotation = unwrap_type(get_args(annotation)[0])
    return annotation if _is_section(annotation) else None


def list_keys(key: Key, root: type[Section] = RunConfig) -> list[str]:
    """List the keys of the section at ``key``."""
    section = find_section(key, root)
    return list(section.model_fields) if section else []


def is_nullable(annotation: Any) -> bool:
    """Whether null is a value of this type; elsewhere it means "not given"."""
    if _is_annotated(annotation):
        return is_nullable(get_args(annotation)[0])
    return annotation is Any or type(None) in _alternatives(annotation)


def unwrap_type(annotation: Any) -> Any:
    """Remove ``Annotated`` and ``| None`` from a type."""
    if _is_annotated(annotation):
        return unwrap_type(get_args(annotation)[0])
    rest = [option for option in _alternatives(annotation) if option is not type(None)]
    return unwrap_type(rest[0]) if len(rest) == 1 else annotation


@cache
def find_input(key: Key, root: type[Section] = RunConfig) -> InputPath | None:
    """Find the InputPath mark of ``key``; None if it is no path that must exist."""
    annotation = find_type(key, root)
    if get_origin(unwrap_type(annotation)) is list:
        annotation = get_args(unwrap_type(annotation))[0]
    return next((mark for mark in _marks(annotation) if isinstance(mark, InputPath)), None)


@cache
def is_path(key: Key, root: type[Section] = RunConfig) -> bool:
    """Whether ``key`` is a path, which a run reads or writes."""
    return any(isinstance(mark, InputPath | OutputPath) for mark in _marks(find_type(key, root)))


def list_marked(section: type[Section], mark: type) -> set[str]:
    """Collect the keys of a section that carry a mark, such as DrawSetting."""
    return {name for name, field in section.model_fields.items() if mark in map(type, field.metadata)}


@cache
def _is_result_relevant(key: Key, root: type[Section] = RunConfig) -> bool:
    """Whether results depend on ``key``: neither it nor a section around it is marked NoEffect."""
    return not _has_mark(key, root, NoEffect)


@cache
def is_continuable(key: Key, root: type[Section] = RunConfig) -> bool:
    """Whether ``key`` may change when a run goes on: a ContinuationSetting, or a path whose contents are compared."""
    mark = find_input(key, root)
    compared = mark is not None and mark.content in ("model", "data")
    return compared or _has_mark(key, root, ContinuationSetting)


def has_default(key: Key, value: Any, root: type[Section] = RunConfig) -> bool:
    """Whether ``value``, as JSON has it, is the schema's default of ``key``."""
    section = find_section(key[:-1], root)
    field = section.model_fields.get(str(key[-1])) if section else None
    return field is not None and not field.is_required() and field.get_default(call_default_factory=True) == value


def _has_mark(key: Key, root: type[Section], mark_type: type) -> bool:
    around = (find_type(key[:depth], root) for depth in range(1, len(key) + 1))
    return any(isinstance(mark, mark_type) for annotation in around for mark in _marks(annotation))


def list_relevant_settings(settings: Section) -> Iterator[tuple[Key, Any]]:
    """Yield the key and the value, as JSON has it, of every setting that results depend on."""
    leaves = _iterate_leaves(settings.model_dump(mode="json"), ())
    return ((key, value) for key, value in leaves if _is_result_relevant(key, type(settings)))


def _iterate_leaves(value: Any, key: Key) -> Iterator[tuple[Key, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not items:
        yield key, value
    for name, item in items:
        yield from _iterate_leaves(item, (*key, name))


def _inside(annotation: Any, name: str | int) -> Any:
    annotation = unwrap_type(annotation)
    if _is_section(annotation):
        field = annotation.model_fields.get(name)
        if field is None:
            return Any
        return Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    if get_origin(annotation) is dict:
        return get_args(annotation)[1]
    if get_origin(annotation) is list:
        return get_args(annotation)[0] if isinstance(name, int) else _inside(get_args(annotation)[0], name)
    return Any


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _is_annotated(annotation: Any) -> bool:
    return get_origin(annotation) is Annotated


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """The parts of a union; none for another type."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else ()


def _marks(annotation: Any) -> tuple[Any, ...]:
    """What ``Annotated`` adds to a type, inside a union as well."""
    if _is_annotated(annotation):
        return (*get_args(annotation)[1:], *_marks(get_args(annotation)[0]))
    return tuple(mark for option in _alternatives(annotation) for mark in _marks(option))
