"""Writes a run's YAML to begin with: short, or as a commented template of all settings."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Collection, Iterator, Mapping
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from coalign.config.errors import Key
from coalign.config.functions import list_arguments, list_functions, resolve, shorten_name
from coalign.config.introspect import find_section, unwrap_type
from coalign.config.layering import escape_references
from coalign.config.schema import Function, ModelConfig, RunConfig, Section
from coalign.config.yaml_reader import emit

_WIDTH = 110


def to_commented_yaml(config: RunConfig | Mapping[str, Any], unread: Collection[str] = ()) -> str:
    """Write a template: the keys of ``config``, and all others commented out with their defaults and descriptions.

    ``config`` may be partial, in the shape of the YAML (such as a recipe's defaults). The first of several models shows
    all keys, the others only their own. ``unread`` are dotted keys to leave out, those of models without the model's
    name. ``load`` reads the result as it reads ``config``.
    """
    given = escape_references(config.model_dump()) if isinstance(config, RunConfig) else config
    return "\n".join(_TemplateWriter(unread).section(RunConfig, given, ())).lstrip() + "\n"


def to_short_yaml(config: Mapping[str, Any]) -> str:
    """Write the keys of ``config``, in the shape of the YAML, and nothing else but a line of description of each."""
    return "\n".join(_describe_keys(config, ())) + "\n"


def _describe_keys(given: Mapping[str, Any], key: Key) -> Iterator[str]:
    """Yield a line for each key, with the first sentence of its description where that fits."""
    indent, section = "  " * len(key), find_section(key) if key else RunConfig
    for name, value in given.items():
        if isinstance(value, dict):
            yield f"{indent}{name}:"
            yield from _describe_keys(value, (*key, name))
            continue
        assert section is not None, f"{key} is no section"
        [line] = _lines(name, value, indent)
        about = re.sub(r"\.( .*)?$", "", _describe(section.model_fields[name]))
        yield f"{line}  # {about}" if about and len(line) + len(about) < _WIDTH else line


class _TemplateWriter:
    """Writes the lines of sections: keys that are given, and all others as comments. ``unread`` keys are left out."""

    def __init__(self, unread: Collection[str]) -> None:
        self.unread = unread
        self.listed: set[str] = set()  # homes of functions, each listed where it is first used

    def section(self, schema: type[Section], given: Mapping[str, Any], key: Key) -> Iterator[str]:
        """Yield the lines of the section at ``key``; keys that the schema does not declare come last."""
        indent = "  " * len(key)
        within = (*key[:1], *key[2:]) if key[:1] == ("models",) else key
        for name, field in schema.model_fields.items():
            if ".".join(map(str, (*within, name))) not in self.unread:
                yield from [] if key else [""]
                yield from self.comment(field, indent)
                yield from self.field(field, given, (*key, name))
        arguments = _list_arguments_of(schema, given)
        for name, parameter in arguments.items():
            value = to_jsonable_python(given.get(name, parameter.default))
            yield from _lines(name, value, indent if name in given else f"{indent}# ")
        for name in [name for name in given if name not in schema.model_fields and name not in arguments]:
            yield from _lines(name, given[name], indent)

    def comment(self, field: FieldInfo, indent: str) -> Iterator[str]:
        """Yield a field's description and, if it names a function, the available functions with their arguments."""
        yield from textwrap.wrap(
            _describe(field), _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "
        )
        inner = unwrap_type(field.annotation)
        section = unwrap_type(get_args(inner)[0]) if get_origin(inner) is list else inner
        home = section.home if isinstance(section, type) and issubclass(section, Function) else ""
        if not home or home in self.listed:
            return
        self.listed.add(home)
        yield f"{indent}# A function of your own (`my.module:name`), or one of these:"
        for name, fn in list_functions(home).items():
            arguments = {p.name: "…" if p.default is p.empty else p.default for p in list_arguments(fn).values()}
            text = emit(to_jsonable_python({"fn": shorten_name(name), **arguments}), flow=True)
            yield f"{indent}#   {textwrap.shorten(text, _WIDTH - len(indent) - 4, placeholder=' …')}"

    def field(self, field: FieldInfo, given: Mapping[str, Any], key: Key) -> Iterator[str]:
        """Yield the lines of a key; for a section that is given or has a default, those of all its keys."""
        indent, name = "  " * (len(key) - 1), str(key[-1])
        inner, section, value = unwrap_type(field.annotation), find_section(key), given.get(name)
        if get_origin(inner) is list and isinstance(value, list):
            value = value[0] if len(value) == 1 else None
        if get_origin(inner) is dict and get_args(inner)[1] is ModelConfig:
            yield f"{name}:"
            yield from self.models(value or {}, key)
        elif section and (value is not None or isinstance(field.default, Section)):
            yield f"{indent}{name}:"
            settings = {str(section.shorthand): value} if isinstance(value, str) else value or {}
            yield from self.section(section, settings, key)
        elif name in given:
            yield from _lines(name, given[name], indent)
        else:
            default = field.examples[0] if field.examples else field.get_default()
            yield from _lines(name, default.model_dump() if isinstance(default, BaseModel) else default, f"{indent}# ")

    def models(self, models: Mapping[str, Any], key: Key) -> Iterator[str]:
        for index, (name, model) in enumerate(models.items()):
            if index == 0:
                yield f"  {name}:"
                yield from self.section(ModelConfig, model, (*key, name))
            else:
                yield from _lines(name, model, "  ")


def _list_arguments_of(schema: type[Section], given: Mapping[str, Any]) -> Mapping[str, inspect.Parameter]:
    """Return the arguments of the function that a section names by a short name."""
    if not issubclass(schema, Function):
        return {}
    fn = given.get("fn", schema.model_fields["fn"].default)
    return list_arguments(resolve(fn, schema.home)) if isinstance(fn, str) and ":" not in fn else {}


def _describe(field: FieldInfo) -> str:
    return re.sub(r"\bNone\b", "null", " ".join((field.description or "").split()))


def _lines(name: str, value: Any, indent: str) -> Iterator[str]:
    text = f"{name}: {emit(value, flow=True)}" if isinstance(value, dict | list) else emit({name: value})
    yield from (indent + line for line in text.removesuffix("\n").split("\n"))
