"""A configuration written out: as YAML, as a commented template, and the schema for editors."""

from __future__ import annotations

from typing import Any

from coalign.config.reading import emit
from coalign.config.schema import RunConfig


def dump(config: RunConfig) -> str:
    """The whole configuration as YAML, every default included; ``load`` reads it back to an equal one."""
    return emit(_escaped(config.model_dump(mode="json")))


def _escaped(value: Any) -> Any:
    """The value with ``${`` of texts written so that it is not read as a reference."""
    if isinstance(value, dict):
        return {name: _escaped(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value
