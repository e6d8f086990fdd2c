"""Coalign: alignment training of language models, several models in one run, from a laptop to a Ray cluster.

The names below are the public API (docs/python.md). Each is imported when it is first used, so `import coalign` is
fast and loads no torch. Begin with `train`.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    evaluate: Callable[..., Any]  # comes with coalign-serve, as `generate` does
    generate: Callable[..., Any]
    from coalign.api import TrainingStopped as TrainingStopped
    from coalign.api import TrainResult as TrainResult
    from coalign.api import load_config as load_config
    from coalign.api import train as train
    from coalign.data.batch import Batch as Batch
    from coalign.engine.engine import Engine as Engine
    from coalign.engine.engine import Hook as Hook
    from coalign.types import LossInput as LossInput
    from coalign.types import LossOutput as LossOutput
    from coalign.types import Sample as Sample
    from coalign.types import Stat as Stat

from coalign.processes.host import prepare_threads

__version__ = "0.1.0"

_MODULES = {
    "coalign.api": ("train", "load_config", "TrainResult", "TrainingStopped"),
    "coalign.data.batch": ("Batch",),
    "coalign.engine.engine": ("Engine", "Hook"),
    "coalign.types": ("LossInput", "LossOutput", "Sample", "Stat"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}
_MOVED = {
    "coalign.weights.families": "coalign_megatron.families (coalign-megatron)",
    "coalign.weights.layouts.megatron": "coalign_megatron.layouts.megatron (coalign-megatron)",
    "coalign.backends.engines.native.engine": "coalign.backends.engines.native.native_engine",
}
__all__ = [*_HOMES, "evaluate", "generate", "__version__"]

# Bars and load reports of libraries would tear Coalign's own display, in this process and in every worker.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
prepare_threads(os.environ)


class _MovedModules:
    """Names the new place of a documented module that has moved, where Python would say that there is none."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name in _MOVED:
            raise ModuleNotFoundError(f"{name} has moved: import {_MOVED[name]}", name=name)


sys.meta_path.append(_MovedModules)  # asked last, for what nobody else finds


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    from coalign.companions import API, load

    if (brought := load(API, name, f"coalign.{name}")) is not None:
        return brought
    raise AttributeError(f"module 'coalign' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
