"""Megatron's `torch_dist` directories (torch.distributed.checkpoint): names, a lazy reader and a streaming writer.

The writer uses the layout of megatron-core 0.16 (`common.pt` beside the tensors), which later versions can read. The
reader also knows theirs, with the object `common_state` instead. Chunks are consecutive `torch.save` archives.

A tensor stacks layers on its first axis and experts on the next. If the model has both dense layers and layers with
experts, each layer has its own key.
"""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.utils.serialization import config as serialization

from coalign.weights.metadata import METADATA, read_metadata
from coalign_megatron.convert.files import HashedFile, write_hashed
from coalign_megatron.convert.legacy import refuse_compressed
from coalign_megatron.families import MegatronConfig, Parameter
from coalign_megatron.layouts.megatron_model import EXPERT, LAYER, name_in_torch_dist
from coalign_megatron.layouts.shards import Box, Shape, Shard, ShardBox, overlap

STACKED = "decoder.layers."
Flavour = Literal["local", "te"]  # names of norms: megatron-core's own layers, or Transformer Engine's


def has_stacked_layers(config: MegatronConfig) -> bool:
    """Return whether megatron-core stacks all layers in one tensor, as it does if all are alike."""
    return len(set(config.moe_layer_freq)) < 2


@dataclass(frozen=True, slots=True)
class TorchDistKey:
    """The location of a parameter: ``index`` (layer, expert) in tensor ``key``, whose first axes are ``stacked``."""

    key: str
    index: tuple[int, ...] = ()
    stacked: tuple[int, ...] = ()

    @property
    def object(self) -> str:
        """The name of an object (`_extra_state`) at this location."""
        index, sizes = self.index or (0,), self.stacked or (1,)
        return f"{self.key}/shard_{'.'.join(map(str, index))}_{'.'.join(map(str, sizes))}"


@dataclass(frozen=True, slots=True)
class TorchDistNaming:
    """Names of parameters. ``stacked``: layers share a tensor, which they do unless `moe_layer_freq` is a list."""

    flavour: Flavour
    stacked: bool

    def place(self, parameter: Parameter, config: MegatronConfig) -> TorchDistKey:
        name = name_in_torch_dist(config, parameter, self.flavour)
        if parameter.layer is None:
            return TorchDistKey(name)
        return self._locate(name.removeprefix(LAYER), parameter, config)

    def objects(self, parameter: Parameter, config: MegatronConfig) -> list[TorchDistKey]:
        """Return the `_extra_state` of a weight's module: empty, but Megatron requires it. Further ones do no harm."""
        if not parameter.template.endswith(".weight") or parameter.sharding == "vocabulary":
            return []
        linear = parameter.sharding in ("column", "row", "gated")
        if not linear and self.flavour == "local":
            return []
        module = parameter.template.removesuffix(".weight")
        if parameter.layer is None:
            return [TorchDistKey(f"{module}._extra_state")]
        relative = module.removeprefix(LAYER)
        names = [relative]
        if relative == "self_attention.linear_proj" and self.flavour == "te":
            names.append("self_attention.core_attention")
        return [self._locate(f"{relative_name}._extra_state", parameter, config) for relative_name in names]

    def _locate(self, relative: str, parameter: Parameter, config: MegatronConfig) -> TorchDistKey:
        assert parameter.layer is not None
        prefix, index, sizes = f"decoder.layers.{parameter.layer}.", (), ()
        if self.stacked:
            prefix, index, sizes = STACKED, (parameter.layer,), (config.num_layers,)
        if parameter.expert is not None:
            assert config.num_moe_experts is not None
            relative = relative.replace(EXPERT, "mlp.experts.experts.")
            index, sizes = (*index, parameter.expert), (*sizes, config.num_moe_experts)
        return TorchDistKey(prefix + relative, index, sizes)


COMMON, BACKEND = "common.pt", "metadata.json"
FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
# Keys of training state: optimizers, random numbers, schedules, unsharded objects.
TRAINING_STATE = ("optimizer", "chained_", "rng_state", "opt_param_scheduler", "rerun_state_machine", "common_state")


# ---- reading


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk of a tensor, and its location in a file."""

    file: Path
    offset: int
    length: int
    shape: Shape
    dtype: torch.dtype


class TorchDistWeights:
    """The weights of a directory.

    Raises ValueError for missing or unknown keys, and for files that are cut off.
    """

    def __init__(self, folder: Path, parameters: Mapping[str, Parameter], config: MegatronConfig) -> None:
        self.folder = folder
        self._maps: dict[Path, np.ndarray] = {}
        metadata = read_metadata(folder)
        tensors = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, dcp.TensorStorageMetadata) and not key.startswith(TRAINING_STATE)
        }
        self.naming = _find_naming(tensors, parameters, config)
        self.chunks: dict[str, StoredChunk] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        shards = []
        for key, held in self._group_by_key(tensors, parameters, config).items():
            stored = tensors[key]
            for chunk in stored.chunks:
                shard = _make_shard(key, chunk, held)
                shards.append(shard)
                self.chunks[shard.name] = self._find_chunk(metadata, key, chunk, stored.properties.dtype)
            for _, parameter in held:
                self.dtypes |= dict.fromkeys(parameter.sources, stored.properties.dtype)
        self._check_files()
        self.ranks = [shards]

    def _group_by_key(
        self,
        tensors: Mapping[str, dcp.TensorStorageMetadata],
        parameters: Mapping[str, Parameter],
        config: MegatronConfig,
    ) -> dict[str, list[tuple[TorchDistKey, Parameter]]]:
        keys: dict[str, list[tuple[TorchDistKey, Parameter]]] = {}
        for parameter in parameters.values():
            location = self.naming.place(parameter, config)
            keys.setdefault(location.key, []).append((location, parameter))
        missing, extra = [key for key in keys if key not in tensors], [key for key in tensors if key not in keys]
        if missing or extra:
            raise ValueError(f"{self.folder} does not match config.json: missing {missing}, extra {extra}")
        wrong = [
            f"'{key}' {list(tensors[key].size)} (config.json: {list((*location.stacked, *parameter.shape))})"
            for key, [(location, parameter), *_] in keys.items()
            if tuple(tensors[key].size) != (*location.stacked, *parameter.shape)
        ]
        if wrong:
            raise ValueError(f"{self.folder}: shapes that differ from config.json: {', '.join(wrong)}")
        return keys

    def _find_chunk(
        self, metadata: dcp.Metadata, key: str, chunk: dcp.ChunkStorageMetadata, dtype: torch.dtype
    ) -> StoredChunk:
        span = metadata.storage_data.get(dcp.MetadataIndex(key, chunk.offsets))
        if span is None:
            raise ValueError(f"{self.folder / METADATA} does not say where '{key}' at {list(chunk.offsets)} is")
        return StoredChunk(self.folder / span.relative_path, span.offset, span.length, tuple(chunk.sizes), dtype)

    def _check_files(self) -> None:
        ends: dict[Path, int] = {}
        for chunk in self.chunks.values():
            ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.offset + chunk.length)
        for file, end in ends.items():
            if not file.is_file():
                raise ValueError(f"{file} is missing")
            if (size := file.stat().st_size) < end:
                raise ValueError(f"{file} is cut off: {size} bytes, {end} are needed")

    def fetch(self, rank: int, name: str) -> Tensor:
        stored = self.chunks[name]
        if stored.file not in self._maps:
            # Copy on write, because torch warns of arrays that it may not write to.
            self._maps[stored.file] = np.memmap(stored.file, np.uint8, "c")
        return _map_chunk(stored, self._maps[stored.file])


def count_vocabulary_rows(folder: Path) -> int:
    """Count the rows of the word embedding, padding included. Raises ValueError if there is none."""
    entry = read_metadata(folder).state_dict_metadata.get("embedding.word_embeddings.weight")
    if not isinstance(entry, dcp.TensorStorageMetadata):
        raise ValueError(f"{folder} has no embedding.word_embeddings.weight")
    return entry.size[0]


def _find_naming(
    keys: Mapping[str, Any], parameters: Mapping[str, Parameter], config: MegatronConfig
) -> TorchDistNaming:
    """Return the naming with the fewest missing keys."""
    candidates = [TorchDistNaming(flavour, stacked) for stacked in (True, False) for flavour in ("te", "local")]
    return min(candidates, key=lambda n: len({n.place(p, config).key for p in parameters.values()} - keys.keys()))


def _make_shard(key: str, chunk: dcp.ChunkStorageMetadata, held: Sequence[tuple[TorchDistKey, Parameter]]) -> Shard:
    """Describe a chunk in boxes of Hugging Face tensors. It may span several layers or experts."""
    offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
    box: Box = tuple((start, start + size) for start, size in zip(offsets, sizes, strict=True))
    pieces: list[ShardBox] = []
    for location, parameter in held:
        lead = tuple((i, i + 1) for i in location.index)
        full = (*lead, *((0, size) for size in parameter.shape))
        if (both := overlap(box, full)) is not None:
            here = tuple((start - at, stop - at) for (start, stop), at in zip(both, offsets, strict=True))
            pieces += parameter.placed(both[len(lead) :], here)
    name = f"{key}@{','.join(map(str, offsets))}"
    # A chunk of padding only has the dtype of the tensor that it pads.
    like = pieces[0].name if pieces else held[0][1].pieces[0].name
    return Shard(name, sizes, like, tuple(pieces))


def _map_chunk(stored: StoredChunk, file_map: np.ndarray) -> Tensor:
    """Return a chunk as a view of its mapped file. The archive says where its only record is, and its strides."""
    with open(stored.file, "rb") as file:
        view = _Slice(file, stored.offset, stored.length)
        try:
            archive = zipfile.ZipFile(view)
            refuse_compressed(archive)
            record = next(entry for entry in archive.infolist() if entry.filename.endswith("/data/0"))
            view.seek(0)
            with torch.serialization.skip_data():
                like = torch.load(cast(IO[bytes], view), weights_only=True)
            view.seek(record.header_offset)
            head = view.read(30)
            start = record.header_offset + 30 + sum(int.from_bytes(head[i : i + 2], "little") for i in (26, 28))
            data = torch.from_numpy(file_map[stored.offset :][start : min(stored.length, start + record.file_size)])
            tensor = data.view(like.dtype).as_strided(like.shape, like.stride(), like.storage_offset())
        except Exception as problem:  # a damaged archive raises almost anything
            raise ValueError(f"{stored.file} is damaged at byte {stored.offset}: {problem}") from problem
    if tuple(like.shape) != stored.shape or like.dtype != stored.dtype:
        raise ValueError(
            f"{stored.file} is damaged at byte {stored.offset}: {list(like.shape)} {like.dtype} is stored, "
            f"{METADATA} says {list(stored.shape)} {stored.dtype}"
        )
    return tensor


class _Slice(io.RawIOBase):
    """A slice of a file, as a file."""

    def __init__(self, file: io.BufferedReader, offset: int, length: int) -> None:
        self.file, self.offset, self.length, self.at = file, offset, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + (0, self.at, self.length)[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        self.file.seek(self.offset + self.at)
        count = self.file.readinto(view[: max(0, self.length - self.at)])
        self.at += count
        return count


# ---- writing


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """A chunk to write. ``shard`` does not have the axes of the stack."""

    location: TorchDistKey
    offsets: Shape
    shard: Shard
    size: Shape  # the shape of the complete tensor
    dtype: torch.dtype

    @property
    def sizes(self) -> Shape:
        return (*(1 for _ in self.location.index), *self.shard.shape)


def append_archive(file: HashedFile, value: Any) -> tuple[int, int]:
    """Append an archive; returns its offset and length in bytes.

    It has no CRC-32 checksums, which no version of torch reads.
    """
    start = file.size
    try:
        with serialization.patch("save.compute_crc32", False):  # pyright: ignore[reportAttributeAccessIssue]  # set at import
            torch.save(value, cast(IO[bytes], file))
    except RuntimeError as problem:  # raised on closing the archive, after the error of a full disk
        if isinstance(problem.__context__, OSError):
            raise problem.__context__ from problem
        raise
    return start, file.size - start


def write_metadata(
    folder: Path,
    chunks: Sequence[Sequence[PlannedChunk]],
    objects: Sequence[str],
    stored: Sequence[Mapping[str, Any]],
) -> None:
    """Write the other files. ``stored``: the record of each file with tensors, with the `places` of its chunks."""
    tensors: dict[str, dcp.TensorStorageMetadata] = {}
    data: dict[dcp.MetadataIndex, _StorageInfo] = {}
    for record, held in zip(stored, chunks, strict=True):
        for chunk, (start, length) in zip(held, record["places"], strict=True):
            key = chunk.location.key
            new = dcp.TensorStorageMetadata(dcp.TensorProperties(chunk.dtype), torch.Size(chunk.size), [])
            tensor = tensors.setdefault(key, new)
            index = dcp.MetadataIndex(key, chunk.offsets, len(tensor.chunks))
            tensor.chunks.append(dcp.ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)))
            data[index] = _StorageInfo(Path(record["name"]).name, start, length)
    name = f"__{len(chunks)}_0.distcp"
    with write_hashed(folder / name) as file:
        for object_key in objects:
            data[dcp.MetadataIndex(object_key)] = _StorageInfo(name, *append_archive(file, [None]))
    with write_hashed(folder / COMMON) as file:
        torch.save({"checkpoint_version": 3.0, "iteration": 0}, cast(IO[bytes], file))
    with write_hashed(folder / METADATA) as file:
        entries = tensors | {object_key: dcp.BytesStorageMetadata() for object_key in objects}
        record = dcp.Metadata(entries, storage_data=data, storage_meta=dcp.StorageMeta(), version="1.0.0")
        file.write(pickle.dumps(record))
    (folder / BACKEND).write_text(json.dumps(FORMAT))
