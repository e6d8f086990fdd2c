"""Typed, strict configuration of a run. Imports no torch."""

from coalign.config.errors import ConfigError, locate_problems
from coalign.config.export import dump
from coalign.config.loading import check_names, load, load_section

__all__ = ["ConfigError", "check_names", "dump", "load", "load_section", "locate_problems"]
