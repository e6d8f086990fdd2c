"""Writes configurations: as YAML, as a commented template, and as the JSON Schema that editors check against."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema

from coalign.config.introspect import unwrap_type
from coalign.config.layers import escape_references
from coalign.config.schema import ModelConfig, RunConfig, Section
from coalign.config.secrets import hide_secrets
from coalign.config.yaml_reader import emit

_WIDTH = 110


def dump(config: RunConfig) -> str:
    """Write the whole configuration as YAML, defaults included; ``load`` reads it back to an equal one.

    It refers to environment variables that are named like secrets, as the source did.
    """
    return emit(hide_secrets(escape_references(config.model_dump())))


def build_json_schema() -> dict[str, Any]:
    """Build the JSON Schema of a run's YAML, with the short forms, references and nulls that ``load`` accepts."""
    schema = RunConfig.model_json_schema(schema_generator=_AsWritten)
    schema["properties"]["include"] = {
        "description": "YAML files beneath this one, relative to it; later ones win.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    return {"$schema": GenerateJsonSchema.schema_dialect, **schema, "title": "Coalign run"}


def to_commented_yaml(config: RunConfig | Mapping[str, Any]) -> str:
    """Write a template: the keys of ``config``, and all others commented out with their defaults and descriptions.

    ``config`` may be partial, in the shape of the YAML (such as a recipe's defaults). The first of several models shows
    all keys, the others only their own. ``load`` reads the result as it reads ``config``.
    """
    given = escape_references(config.model_dump()) if isinstance(config, RunConfig) else config
    return "\n".join(_section(RunConfig, given, "")).lstrip() + "\n"


class _AsWritten(GenerateJsonSchema):
    """Also admits references for all values, texts for sections with a shorthand, and null for the default."""

    def model_schema(self, schema: Any) -> dict[str, Any]:
        found = super().model_schema(schema)
        for name, value in found.get("properties", {}).items():
            found["properties"][name] = _or_reference(value)
        cls = schema["cls"]
        return {"anyOf": [{"type": "string"}, found]} if issubclass(cls, Section) and cls.shorthand else found

    def dict_schema(self, schema: Any) -> dict[str, Any]:
        found = super().dict_schema(schema)
        values = found["additionalProperties"]
        return found if values is True else {**found, "additionalProperties": {"anyOf": [values, {"type": "null"}]}}

    def function_before_schema(self, schema: Any) -> dict[str, Any]:
        found = self.generate_inner(schema["schema"])
        return {"anyOf": [found["items"], found]} if found.get("type") == "array" else found


def _or_reference(value: dict[str, Any]) -> dict[str, Any]:
    about = {name: value[name] for name in ("title", "description", "default") if name in value}
    kind = {name: item for name, item in value.items() if name not in about}
    reference = {"type": "string", "pattern": r"\$\{.+\}"}
    return {**about, "anyOf": [*(kind["anyOf"] if set(kind) == {"anyOf"} else [kind]), reference, {"type": "null"}]}


def _section(kind: type[BaseModel], given: Mapping[str, Any], indent: str) -> Iterator[str]:
    """Yield the lines of a section, key by key; keys that the schema does not declare come last."""
    for name, field in kind.model_fields.items():
        if not indent:
            yield ""
        yield from _comment(field, indent)
        yield from _field(name, field, given, indent)
    for name in [name for name in given if name not in kind.model_fields]:
        yield from _lines(name, given[name], indent)


def _field(name: str, field: FieldInfo, given: Mapping[str, Any], indent: str) -> Iterator[str]:
    inner = unwrap_type(field.annotation)
    value = given.get(name)
    if get_origin(inner) is dict and get_args(inner)[1] is ModelConfig:
        yield f"{indent}{name}:"
        yield from _models(value or {}, indent + "  ")
    elif _is_section(inner) and (value is not None or isinstance(field.default, Section)):
        yield f"{indent}{name}:"
        yield from _section(inner, {"fn": value} if isinstance(value, str) else value or {}, indent + "  ")
    elif name in given:
        yield from _lines(name, value, indent)
    else:
        default = field.examples[0] if field.examples else field.get_default()
        yield from _lines(name, default.model_dump() if isinstance(default, BaseModel) else default, f"{indent}# ")


def _models(models: Mapping[str, Any], indent: str) -> Iterator[str]:
    for index, (name, model) in enumerate(models.items()):
        if index == 0:
            yield f"{indent}{name}:"
            yield from _section(ModelConfig, model, indent + "  ")
        else:
            yield from _lines(name, model, indent)


def _comment(field: FieldInfo, indent: str) -> Iterator[str]:
    text = re.sub(r"\bNone\b", "null", " ".join((field.description or "").split()))
    yield from textwrap.wrap(text, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


def _lines(name: str, value: Any, indent: str) -> Iterator[str]:
    text = f"{name}: {emit(value, flow=True)}" if isinstance(value, dict | list) else emit({name: value})
    yield from (indent + line for line in text.removesuffix("\n").split("\n"))


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)
