"""Writes configurations as YAML, and tells which of their keys a person wrote."""

from __future__ import annotations

from coalign.config.errors import ConfigLocation, Key, format_key
from coalign.config.layering import escape_references
from coalign.config.schema import RunConfig
from coalign.config.secrets import hide_secrets
from coalign.config.yaml_reader import emit, flatten


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
