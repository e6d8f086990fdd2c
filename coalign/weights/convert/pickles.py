"""Pickles of others, read without running anything that they name: unknown classes become empty stand-ins."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import IO, Any

import torch

KNOWN = {  # beside the records of torch.distributed.checkpoint.metadata
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
}


class Unread:
    """An object of a class that is not loaded."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Unread:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {})


def load(path: Path, *, mmap: bool = False) -> Any:
    """A file of torch.save (1.6 or later), with `weights_only`. ValueError for one that is damaged."""
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} cannot be read, is it cut off? (it is no archive of torch.save)")
    try:
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        with torch.serialization.safe_globals([(_stand_in(name), name) for name in unknown]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as problem:
        raise ValueError(f"{path} cannot be read, is it cut off? ({str(problem).splitlines()[0]})") from problem


def _stand_in(name: str) -> type:
    module, _, own = name.rpartition(".")
    return type(own, (Unread,), {"__module__": module})


class Restricted(pickle.Unpickler):
    """Of `.metadata`: knows the records of torch.distributed.checkpoint, and dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        inert = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout)
        record = module == "torch.distributed.checkpoint.metadata" and "." not in name
        if inert or record or (module, name) in KNOWN:
            return super().find_class(module, name)
        return _stand_in(f"{module}.{name}")


def metadata(file: IO[bytes], path: Path) -> Any:
    """The Metadata record of a torch.distributed.checkpoint directory. ValueError for what is none."""
    try:
        return Restricted(file).load()
    except Exception as problem:  # a damaged pickle raises almost anything
        raise ValueError(f"{path} cannot be read, is it cut off? ({problem})") from problem
