"""Reads checkpoints of torch.distributed.checkpoint that are not trusted: nothing in them runs code.

torch describes a directory in the pickle `.metadata`, which it loads as any pickle, calls included. Here a pickle makes
no object but _PickledObject, from which the expected records are built afterwards.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint._nested_dict import set_element  # pyright: ignore[reportPrivateImportUsage]: torch's own planner has it so
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

METADATA = ".metadata"
_DTYPES = {f"torch.{name}": dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
_KEYS = (str, int, float, bytes, type(None))  # a nested tuple could take for ever to hash


class DistributedCheckpointReader(FileSystemReader):
    """torch's reader of a directory, with this module's reader of `.metadata`, which is read once."""

    _metadata: dcp.Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        if self._metadata is None:
            self._metadata = read_metadata(Path(self.path))
            self._metadata.storage_meta = dcp.StorageMeta(load_id=self.load_id)
        return self._metadata

    def fill(self, state: Any, planner: LoadPlanner, *, alone: bool = False) -> None:
        """Load the checkpoint into ``state`` (a collective, unless ``alone``). Raises ValueError if it is damaged."""
        try:
            state_dict_loader.load(state, storage_reader=self, planner=planner, no_dist=alone)
        except CheckpointException as problem:  # no Exception, which a worker would not report
            raise ValueError(f"checkpoint {self.path} cannot be read: {describe_failures(problem)}") from problem


def describe_failures(problem: CheckpointException) -> str:
    """Return the first line of each rank's error, which torch's own text has behind a traceback."""
    return "; ".join(dict.fromkeys(str(error).split("\n", 1)[0] for error, _ in problem.failures.values()))


class DistributedCheckpointPlanner(DefaultLoadPlanner):
    """torch's planner, which loads objects with `weights_only`."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded, name = torch.load(value, weights_only=True), read_item.dest_index.fqn
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded


def read_metadata(folder: Path) -> dcp.Metadata:
    """Read `.metadata`. Raises ValueError for another content, OSError for a file that cannot be read. Its shapes,
    chunks and locations are left; nothing that Coalign loads needs more."""
    path = folder / METADATA
    data = path.read_bytes()
    try:
        return _build_metadata(_MetadataUnpickler(io.BytesIO(data)).load())
    except Exception as problem:  # a damaged pickle raises almost anything
        raise ValueError(f"{path} cannot be read, is it cut off? ({type(problem).__name__}: {problem})") from problem


# ---- the pickle


@dataclass(slots=True, eq=False)
class _PickledObject:
    """An object as a pickle describes it: the class's name, the arguments of the call that makes it, and its state."""

    name: str
    arguments: Any
    state: Any = None


@dataclass(slots=True, eq=False)
class _PickledName:
    """A name that the pickle would import."""

    name: str


class _MetadataUnpickler(pickle._Unpickler):
    """An unpickler that imports and calls nothing. In Python, because C's takes gigabytes for a wrong memo index."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]  # this and the next two belong to the base class
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def find_class(self, module: str, name: str) -> Any:
        return _PickledName(f"{module}.{name}")

    def load_reduce(self) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        if not isinstance(name, _PickledName):
            raise pickle.UnpicklingError(f"a call of a {type(name).__name__}")
        dictionary = name.name == "collections.OrderedDict" and arguments == ()
        self.append({} if dictionary else _PickledObject(name.name, arguments))

    def load_build(self) -> None:
        state, built = self.stack.pop(), self.stack[-1]
        if not isinstance(built, _PickledObject):
            raise pickle.UnpicklingError(f"a state for a {type(built).__name__}")
        built.state = state

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        _set_items(self.stack[-1], [key, value])

    def load_setitems(self) -> None:
        items = self.pop_mark()
        _set_items(self.stack[-1], items)

    def load_additems(self) -> None:
        self.pop_mark()  # the items of a set, which no record has

    def refuse(self) -> NoReturn:
        raise pickle.UnpicklingError("an instruction that no .metadata has")

    for _method, _codes in (
        (load_reduce, (pickle.REDUCE, pickle.NEWOBJ)),
        (load_build, (pickle.BUILD,)),
        (load_setitem, (pickle.SETITEM,)),
        (load_setitems, (pickle.SETITEMS,)),
        (load_additems, (pickle.ADDITEMS,)),
        (refuse, (pickle.NEWOBJ_EX, pickle.INST, pickle.OBJ, pickle.DICT, pickle.FROZENSET, pickle.BYTEARRAY8)),
    ):
        dispatch |= dict.fromkeys([_code[0] for _code in _codes], _method)


def _set_items(container: Any, items: list[Any]) -> None:
    if type(container) is not dict:
        raise pickle.UnpicklingError(f"entries of a {type(container).__name__}")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not isinstance(key, (*_KEYS, _PickledObject)):
            raise pickle.UnpicklingError(f"a {type(key).__name__} as a key")
        container[key] = value


# ---- the records


def _build_metadata(pickled: Any) -> dcp.Metadata:
    fields = _read_state(pickled, dcp.Metadata)
    entries = {_check(k, str): _build_entry(entry) for k, entry in _check(fields["state_dict_metadata"], dict).items()}
    stored = _check(fields.get("storage_data") or {}, dict)
    return dcp.Metadata(entries, storage_data={_build_index(k): _build_storage(info) for k, info in stored.items()})


def _build_entry(pickled: Any) -> dcp.TensorStorageMetadata | dcp.BytesStorageMetadata:
    if isinstance(pickled, _PickledObject) and pickled.name == _name(dcp.BytesStorageMetadata):
        return dcp.BytesStorageMetadata()
    fields = _read_state(pickled, dcp.TensorStorageMetadata)
    size = _build_size(fields["size"])
    dtype = _read_state(fields["properties"], dcp.TensorProperties, tuple)[0]
    chunks = [_build_chunk(chunk, size) for chunk in _check(fields["chunks"], list)]
    return dcp.TensorStorageMetadata(dcp.TensorProperties(_DTYPES[_check(dtype, _PickledName).name]), size, chunks)


def _build_chunk(pickled: Any, size: torch.Size) -> dcp.ChunkStorageMetadata:
    fields = _read_state(pickled, dcp.ChunkStorageMetadata)
    offsets, sizes = _build_size(fields["offsets"]), _build_size(fields["sizes"])
    if any(at + length > limit for at, length, limit in zip(offsets, sizes, size, strict=True)):
        raise ValueError(f"a chunk {list(sizes)} at {list(offsets)} of a tensor {list(size)}")
    return dcp.ChunkStorageMetadata(offsets, sizes)


def _build_index(pickled: Any) -> dcp.MetadataIndex:
    fields = _read_state(pickled, dcp.MetadataIndex)
    offset = fields.get("offset")
    return dcp.MetadataIndex(_check(fields["fqn"], str), None if offset is None else _build_size(offset))


def _build_storage(pickled: Any) -> _StorageInfo:
    fields = _read_state(pickled, _StorageInfo)
    file = _check(fields["relative_path"], str)
    if Path(file).name != file or file in ("", ".."):
        raise ValueError(f"the file {file!r} is not in the checkpoint's own directory")
    if fields.get("transform_descriptors"):
        raise ValueError(f"{file!r} is encoded, which Coalign does not read")
    return _StorageInfo(file, _check_size(fields["offset"]), _check_size(fields["length"]))


def _build_size(pickled: Any) -> torch.Size:
    if isinstance(pickled, _PickledObject) and pickled.name == "torch.Size":
        pickled = _check(pickled.arguments, tuple)[0]
    sizes = _check(pickled, tuple)
    if len(sizes) > 64:
        raise ValueError("a shape of more than 64 axes")
    return torch.Size([_check_size(size) for size in sizes])


def _check_size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"a {type(value).__name__} where there must be a size or an offset")
    return value


def _name(record: type) -> str:
    return f"{record.__module__}.{record.__qualname__}"


def _read_state(pickled: Any, record: type, state_type: type = dict) -> Any:
    if not isinstance(pickled, _PickledObject) or pickled.name != _name(record):
        raise ValueError(f"a {type(pickled).__name__} where there must be a {record.__name__}")
    return _check(pickled.state, state_type)


def _check(value: Any, expected: type) -> Any:
    if not isinstance(value, expected):
        raise ValueError(f"a {type(value).__name__} where there must be a {expected.__name__}")
    return value
