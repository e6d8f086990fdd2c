"""The output of a conversion: its files, the tensors in each, and how they are built from the source."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from coalign.files import read_model_config
from coalign.weights.sync.checksums import tensor_bytes
from coalign_megatron.convert import huggingface, torch_dist
from coalign_megatron.convert.files import write_hashed
from coalign_megatron.convert.huggingface import FileTensor
from coalign_megatron.convert.sources import HF, ITERATION, ConversionRequest, OpenedCheckpoint, dtype_keys
from coalign_megatron.convert.torch_dist import PlannedChunk
from coalign_megatron.families import Parameter
from coalign_megatron.layouts.megatron import MegatronLayout, Mesh, split_layers
from coalign_megatron.layouts.shards import (
    Box,
    BoxCopy,
    Fetch,
    Shape,
    Shard,
    ShardBox,
    TensorSpec,
    plan,
    reshard,
    slices,
)

RELEASE = "release"
BLOCK = 16 * 2**20  # bytes built at once
FILES, SMALL = 16, 512 * 2**20  # at least 16 files for the processes, unless they would be smaller than 512 MiB
OPEN = 16  # tensors of the source that stay mapped
Advance = Callable[[int], None]
Entry = TypeVar("Entry")
Record = dict[str, Any]  # describes a written file: name, size, xxh3_128, and `places` of chunks


class ScratchBuffer:
    """Memory for one tensor, reused by the next one. New memory would cost one page fault per page."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def __call__(self, shape: Shape, *, dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        if size > len(self._bytes):
            self._bytes = torch.empty(size, dtype=torch.uint8)
        return self._bytes[:size].view(dtype).view(shape)


def build_shard(
    specs: Mapping[str, TensorSpec], shard: Shard, moves: Sequence[BoxCopy], fetch: Fetch, scratch: ScratchBuffer
) -> Tensor:
    """Return a shard's tensor, which is valid until the next call.

    It is a view of the source, if one box of one tensor of the same dtype covers it.
    """
    dtype = specs[shard.like].dtype
    if len(moves) == 1 and moves[0].target_box == tuple((0, size) for size in shard.shape):
        view = fetch(moves[0].rank, moves[0].source)[slices(moves[0].source_box)]
        return view.reshape(shard.shape).to(dtype)
    return next(tensor for _, tensor in reshard(specs, [shard], {shard.name: moves}, fetch, scratch))


def trim_storage(tensor: Tensor) -> Tensor:
    """Return a tensor whose storage is no larger than itself: torch.save writes the whole storage of a view."""
    return torch.from_numpy(tensor_bytes(tensor)).view(tensor.dtype).view(tensor.shape)


def split_rows(shape: Shape, itemsize: int) -> Iterator[tuple[int, int]]:
    """Yield ranges (start, stop) of rows that fit into ``BLOCK`` bytes, each of at least one row."""
    step = max(1, BLOCK // max(math.prod(shape[1:]) * itemsize, 1))
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])


def row_box(shape: Shape, start: int, stop: int) -> Box:
    """Return the box of some rows, whole in the other dimensions."""
    return ((start, stop), *((0, size) for size in shape[1:]))


def group_by_file(entries: Sequence[Entry], sizes: Sequence[int], limit: int) -> list[list[Entry]]:
    """Split entries of these ``sizes`` into files of up to ``limit`` bytes, or of one larger entry."""
    files: list[list[Entry]] = []
    free = 0
    for entry, size in zip(entries, sizes, strict=True):
        if not files or size > free:
            files.append([])
            free = limit
        files[-1].append(entry)
        free -= size
    return files


class ConversionOutput:
    """The planned files, by number, of ``total`` bytes. ``write`` may be called in any process."""

    def __init__(self, request: ConversionRequest, opened: OpenedCheckpoint) -> None:
        self.request, self.opened = request, opened
        self.dtypes = choose_dtypes(request, opened)
        self.sources = opened.family.sources(opened.config)
        self.specs = {name: TensorSpec(source.shape, self.dtypes[name]) for name, source in self.sources.items()}
        self.changes = dict(opened.changes)
        if request.dtype is not None:
            self.changes |= dtype_keys(read_model_config(opened.hf), request.dtype)

    names: list[str]
    total: int
    details: dict[str, Any]  # for the manifest

    def write(self, number: int, folder: Path, advance: Advance) -> Record:
        """Write one file. Raises OSError for a full disk; nothing of the file is left then."""
        raise NotImplementedError

    def finish(self, folder: Path, records: Sequence[Record]) -> None:
        """Write the files without tensors."""
        raise NotImplementedError

    def build(self, shards: list[Shard], advance: Advance) -> Iterator[Tensor]:
        """Yield the tensors of shards, each valid until the next."""
        weights = self.opened.weights
        fetch, scratch = lru_cache(OPEN)(weights.fetch), ScratchBuffer()
        for shard, (_, moves) in zip(shards, plan(shards, weights.ranks), strict=True):
            tensor = build_shard(self.specs, shard, moves, fetch, scratch)
            yield tensor
            advance(tensor.nbytes)


class HuggingFaceOutput(ConversionOutput):
    """A directory of safetensors files."""

    def __init__(self, request: ConversionRequest, opened: OpenedCheckpoint) -> None:
        super().__init__(request, opened)
        entries = [FileTensor(name, source.stored, self.dtypes[name]) for name, source in self.sources.items()]
        sizes = [entry.size for entry in entries]
        files, self.total = group_by_file(entries, sizes, request.file_size), sum(sizes)
        # Wide types first, so that every tensor is aligned.
        self.files = [sorted(file, key=lambda entry: -entry.dtype.itemsize) for file in files]
        count = len(files)
        many = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        self.names = [huggingface.SAFETENSORS] if count == 1 else many
        self.details = {"format": "hf", "dtype": request.dtype}

    def write(self, number: int, folder: Path, advance: Advance) -> Record:
        entries, name = self.files[number], self.names[number]
        shards = [shard for entry in entries for shard in self._blocks(entry)]
        views = zip(shards, self.build(shards, advance), strict=True)
        tensors = (self.sources[shard.like].write(view) for shard, view in views if view.numel())
        with write_hashed(folder / name) as file:
            huggingface.write_safetensors(file, entries, tensors)
        return {"name": name, "size": file.size, "xxh3_128": file.digest}

    def _blocks(self, entry: FileTensor) -> Iterator[Shard]:
        source = self.sources[entry.name]
        if source.shape != entry.shape or source.transposed:  # built whole: its blocks are not contiguous in the file
            yield huggingface.whole_shard(source)
            return
        for start, stop in split_rows(source.shape, entry.dtype.itemsize):
            box = row_box(source.shape, start, stop)
            local = row_box(source.shape, 0, stop - start)
            shape = (stop - start, *source.shape[1:])
            yield Shard(f"{entry.name}[{start}:{stop}]", shape, entry.name, (ShardBox(entry.name, box, local),))

    def finish(self, folder: Path, records: Sequence[Record]) -> None:
        huggingface.write_index(folder, dict(zip(self.names, self.files, strict=True)))
        huggingface.copy_others(self.opened.hf, folder, self.changes)


class TorchDistOutput(ConversionOutput):
    """A `torch_dist` directory."""

    def __init__(self, request: ConversionRequest, opened: OpenedCheckpoint) -> None:
        super().__init__(request, opened)
        config, family = opened.config, opened.family
        divisor = request.vocab_divisor * request.tensor
        self.parameters = family.parameters(config, vocab_divisor=divisor)
        self._check_layout()
        naming = torch_dist.TorchDistNaming(request.flavour, torch_dist.has_stacked_layers(config))
        parameters = self.parameters.values()
        chunks = [chunk for p in parameters for chunk in self._chunks(naming.place(p, config), p)]
        sizes = [torch.Size(chunk.sizes).numel() * chunk.dtype.itemsize for chunk in chunks]
        self.total = sum(sizes)
        self.files = group_by_file(chunks, sizes, min(request.file_size, max(self.total // FILES, SMALL)))
        self.names = [f"{RELEASE}/__{i}_0.distcp" for i in range(len(self.files))]
        self.objects = [location.object for p in parameters for location in naming.objects(p, config)]
        rows = self.parameters["embedding.word_embeddings.weight"].shape[0]
        self.details = dict(format="torch_dist", dtype=request.dtype, flavour=request.flavour, padded_vocab_size=rows)

    def _check_layout(self) -> None:
        """Raise ValueError if the requested parallel sizes do not divide the model."""
        request, config = self.request, self.opened.config
        try:
            data = request.expert * request.expert_tensor
            mesh = Mesh(request.tensor, request.pipeline, data, request.expert, request.expert_tensor)
            layout = MegatronLayout(config, mesh, split_layers(config.num_layers, request.pipeline), request.flavour)
            if request.expert > 1 and not config.num_moe_experts:
                raise ValueError("the model has no experts")
            for stage in range(request.pipeline):
                layout.shards(self.parameters, mesh.at(stage * mesh.tensor * mesh.data))
        except ValueError as problem:
            sizes = f"--tp {request.tensor} --pp {request.pipeline} --ep {request.expert} --etp {request.expert_tensor}"
            raise ValueError(f"{sizes}: {problem}") from problem

    def _chunks(self, location: torch_dist.TorchDistKey, parameter: Parameter) -> Iterator[PlannedChunk]:
        dtype = self.dtypes[next(iter(parameter.sources))]
        for start, stop in split_rows(parameter.shape, dtype.itemsize):
            box = row_box(parameter.shape, start, stop)
            local = row_box(parameter.shape, 0, stop - start)
            offsets = (*location.index, start, *(0 for _ in parameter.shape[1:]))
            shape = (stop - start, *parameter.shape[1:])
            like = parameter.pieces[0].name
            shard = Shard(f"{parameter.name}[{start}:{stop}]", shape, like, tuple(parameter.placed(box, local)))
            yield PlannedChunk(location, offsets, shard, (*location.stacked, *parameter.shape), dtype)

    def write(self, number: int, folder: Path, advance: Advance) -> Record:
        chunks = self.files[number]
        tensors = self.build([chunk.shard for chunk in chunks], advance)
        path = folder / self.names[number]
        path.parent.mkdir(exist_ok=True)
        with write_hashed(path) as file:
            spans = [
                torch_dist.append_archive(file, trim_storage(tensor).view(chunk.sizes))
                for chunk, tensor in zip(chunks, tensors, strict=True)
            ]
        return {"name": self.names[number], "size": file.size, "xxh3_128": file.digest, "places": spans}

    def finish(self, folder: Path, records: Sequence[Record]) -> None:
        torch_dist.write_metadata(folder / RELEASE, self.files, self.objects, records)
        huggingface.copy_others(self.opened.hf, folder / HF, self.changes)
        (folder / ITERATION).write_text(f"{RELEASE}\n")


def choose_dtypes(request: ConversionRequest, opened: OpenedCheckpoint) -> dict[str, torch.dtype]:
    """Return the dtype in the output for each Hugging Face tensor."""
    dtype: torch.dtype | None = getattr(torch, request.dtype) if request.dtype is not None else None
    dtypes = {name: dtype or stored for name, stored in opened.weights.dtypes.items()}
    for parameter in opened.family.parameters(opened.config).values():
        if parameter.dtype is not None:
            dtypes |= dict.fromkeys(parameter.sources, parameter.dtype)
    return dtypes
