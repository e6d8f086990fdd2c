"""The JSON Schema of a run's YAML, which editors check against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import to_jsonable_python

from coalign.config.functions import get_annotations, list_arguments, list_functions, shorten_name
from coalign.config.schema import Function, RunConfig, Section


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
    return {**_inline(json_schema, json_schema.pop("$defs", {})), **default}


def _inline(value: Any, records: dict[str, Any]) -> Any:
    """Put records in the place of references to them: an argument's schema becomes a part of the run's."""
    if isinstance(value, list):
        return [_inline(item, records) for item in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        return _inline(records[value["$ref"].rpartition("/")[2]], records)
    return {key: _inline(item, records) for key, item in value.items()}
