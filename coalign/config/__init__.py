"""Typed, strict configuration: YAML files and overrides are read, merged, resolved and validated. Imports no torch.

Open `loading.py` first (`load`), then `schema/`, which declares all sections. `yaml_reader.py` parses with positions,
`layers.py` merges files, overrides and defaults, `errors.py` describes problems, `functions.py` resolves names of
functions and checks their arguments, `export.py` writes configurations, `pipelines.py` reads those of several
stages, `secrets.py` keeps secrets out of what is written.
"""

from coalign.config.errors import ConfigError, locate_problems
from coalign.config.export import dump
from coalign.config.loading import check_names, load, load_section

__all__ = ["ConfigError", "check_names", "dump", "load", "load_section", "locate_problems"]
