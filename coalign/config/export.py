"""Writes configurations: as YAML, as a commented template, and as the JSON Schema that editors check against."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, get_args, get_origin

from pydantic import BaseModel, TypeAdapter
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import to_jsonable_python

from coalign.config.errors import ConfigLocation, Key, format_key
from coalign.config.functions import get_annotations, list_arguments, list_functions, resolve, shorten_name
from coalign.config.introspect import find_section, unwrap_type
from coalign.config.layering import escape_references
from coalign.config.schema import Function, ModelConfig, RunConfig, Section
from coalign.config.secrets import hide_secrets
from coalign.config.yaml_reader import emit, flatten

_WIDTH = 110


def dump(config: RunConfig) -> str:
    """Write the whole configuration as YAML, defaults included; ``load`` reads it back to an equal one.

    It refers to environment variables that are named like secrets, as the source did.
    """
    return emit(hide_secrets(escape_references(config.model_dump())))


def list_written(config: RunConfig) -> dict[str, str]:
    """Return the keys that a person wrote, and where: `{"runtime.steps": "run.yaml:4", "seed": "override"}`.

    Defaults, also those of the recipe, are left out, and what a model takes from another by `like`.
    """
    written = {}
    for key, _ in flatten(config.model_dump(exclude_unset=True)):
        location = config.locations.find(key)
        if location is None or location.source.startswith("defaults of ") or _is_inherited(config, key, location):
            continue
        source = location.source.partition(" '")[0]  # an override without its value
        written[format_key(key)] = str(location) if location.line else source
    return written


def _is_inherited(config: RunConfig, key: Key, location: ConfigLocation) -> bool:
    if len(key) < 3 or key[0] != "models":
        return False
    like = config.models[str(key[1])].like
    return like is not None and config.locations.find(("models", like, *key[2:])) == location


def build_json_schema() -> dict[str, Any]:
    """Build the JSON Schema of a run's YAML, with the short forms, references and nulls that ``load`` accepts.

    It has the arguments of every function that a short name can stand for, so it imports all of their modules.
    """
    schema = RunConfig.model_json_schema(schema_generator=_AsWritten)
    schema["properties"]["include"] = {
        "description": "YAML files beneath this one, relative to it; later ones win.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    return {"$schema": GenerateJsonSchema.schema_dialect, **schema, "title": "Coalign run"}


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


class _AsWritten(GenerateJsonSchema):
    """Also admits references for all values, texts for sections with a shorthand, and null for the default."""

    def model_schema(self, schema: Any) -> dict[str, Any]:
        result = super().model_schema(schema)
        for name, value in result.get("properties", {}).items():
            result["properties"][name] = _or_reference(value)
        cls = schema["cls"]
        if issubclass(cls, Function) and cls.home:
            result = _add_functions(result, cls)
        return {"anyOf": [{"type": "string"}, result]} if issubclass(cls, Section) and cls.shorthand else result

    def dict_schema(self, schema: Any) -> dict[str, Any]:
        result = super().dict_schema(schema)
        values = result["additionalProperties"]
        return result if values is True else {**result, "additionalProperties": {"anyOf": [values, {"type": "null"}]}}

    def function_before_schema(self, schema: Any) -> dict[str, Any]:
        result = self.generate_inner(schema["schema"])
        return {"anyOf": [result["items"], result]} if result.get("type") == "array" else result


def _or_reference(value: dict[str, Any]) -> dict[str, Any]:
    about = {name: value[name] for name in ("title", "description", "default") if name in value}
    base = {name: item for name, item in value.items() if name not in about}
    reference = {"type": "string", "pattern": r"\$\{.+\}"}
    return {**about, "anyOf": [*(base["anyOf"] if set(base) == {"anyOf"} else [base]), reference, {"type": "null"}]}


def _add_functions(json_schema: dict[str, Any], section: type[Function]) -> dict[str, Any]:
    """Add the arguments of each of a section's functions to its JSON Schema; `fn` may come from the recipe."""
    functions, cases = list_functions(section.home), []
    for name, fn in functions.items():
        arguments = {argument: _or_reference(_describe_argument(fn, argument)) for argument in list_arguments(fn)}
        cases.append(
            {
                "if": {"properties": {"fn": {"enum": sorted({name, shorten_name(name)})}}, "required": ["fn"]},
                "then": {"properties": arguments, "propertyNames": {"enum": [*section.model_fields, *arguments]}},
            }
        )
    properties = json_schema["properties"]
    names = {"enum": [shorten_name(name) for name in functions]}
    properties["fn"] = {**properties["fn"], "anyOf": [names, *properties["fn"]["anyOf"]]}
    return {**{name: value for name, value in json_schema.items() if name != "required"}, "allOf": cases}


def _describe_argument(fn: Callable[..., Any], name: str) -> dict[str, Any]:
    """Return the JSON Schema of an argument; without a type where pydantic knows none."""
    parameter = list_arguments(fn)[name]
    default = {} if parameter.default is parameter.empty else {"default": to_jsonable_python(parameter.default)}
    try:
        json_schema = TypeAdapter(get_annotations(fn)[name]).json_schema(schema_generator=_AsWritten)
    except PydanticUserError:
        json_schema = {}
    return {**json_schema, **default}


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
