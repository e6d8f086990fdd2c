"""Backends: what computes a model of a run. `models.<name>.module` names one of ``CLASSES``.

Start with ``base.py``: a backend is a subclass of ``Module``, or of ``TrainableModule`` if it learns.

- ``packing.py`` and ``attention.py`` pack a micro-batch.
- ``hf/`` trains models of transformers in plain torch.
- ``engines/`` generates: the contract, and the engines ``native`` and ``transformers``.
- ``scorers/`` only score: reward functions, reward models with a tokenizer of their own, cached answers.

Companions bring others: coalign-deepspeed and coalign-megatron train, coalign-vllm generates, coalign-graders judges.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from fnmatch import fnmatch
from importlib import metadata

from coalign.config.errors import suggest

CLASSES = {
    "fsdp": "coalign.backends.hf.fsdp:FSDPModule",
    "native": "coalign.backends.engines.native.native_engine:NativeModule",
    "transformers": "coalign.backends.engines.transformers:TransformersModule",
    "reward": "coalign.backends.scorers.reward_functions:RewardModule",
    "cached": "coalign.backends.scorers.cached:CachedModule",
    "retokenize": "coalign.backends.scorers.retokenize:RetokenizeModule",
    "cross_tokenizer": "coalign.backends.scorers.retokenize:CrossTokenizerModule",
}


def refuse_owned(options: Iterable[str], owned: Mapping[str, str], section: str) -> None:
    """Raise ValueError for an option of a library that Coalign sets itself. ``owned``: these, and why."""
    if name := next((name for name in options if name in owned), None):
        raise ValueError(f"{section}.{name} is set by Coalign: {owned[name]}")


def refuse_unknown(
    options: Iterable[str], names: Iterable[str], owned: Mapping[str, str], section: str, title: str
) -> None:
    """Raise ValueError for an option that is not among the ``names`` that a library has. ``title``: what it is not."""
    if name := next((name for name in options if name not in names), None):
        raise ValueError(f"{section}.{name} is no {title}{suggest(name, sorted({*names} - owned.keys()))}")


def require_package(module: str, title: str, supported: str, extra: str, *names: str, more: str = "") -> None:
    """Raises ImportError, with the command that installs it, unless a ``supported`` version of a package is installed.
    ``names``: those of its distributions; ``more``: a remark on the command."""
    install, version = f"pip install 'coalign[{extra}]' ({title} {supported}{more})", None
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            version = version or metadata.version(name)
    if version is None:
        raise ImportError(f"module `{module}` needs {title}: {install}")
    if not fnmatch(version, supported):
        raise ImportError(f"module `{module}` works with {title} {supported}; {version} is installed: {install}")
