"""Typed, strict configuration of a run. Imports no torch."""

from coalign.config.errors import ConfigError, located
from coalign.config.export import dump
from coalign.config.loading import check_names, load, load_section

__all__ = ["ConfigError", "check_names", "dump", "load", "load_section", "located"]
