"""Typed, strict configuration: YAML files and overrides are read, merged, resolved and validated. Imports no torch.

Open `loading.py` first (`load`), then `schema/`, which declares all sections. `yaml_reader.py` parses with positions,
`layering.py` merges files, overrides and defaults, `errors.py` describes problems, `functions.py` resolves names of
functions and checks their arguments, `export.py` writes configurations, `secrets.py` keeps secrets out of what is
written.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from coalign.config.errors import ConfigError, locate_problems

if TYPE_CHECKING:
    from coalign.config.export import dump
    from coalign.config.loading import check_names, load, load_section

__all__ = ["ConfigError", "check_names", "dump", "load", "load_section", "locate_problems"]


def __getattr__(name: str) -> Any:
    """Import what reads configurations late: the board reads YAML alone, and saves the 18 MB of pydantic."""
    if name not in __all__:
        raise AttributeError(f"module 'coalign.config' has no attribute '{name}'")
    return getattr(import_module("coalign.config.export" if name == "dump" else "coalign.config.loading"), name)
