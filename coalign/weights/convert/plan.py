"""What a conversion writes: files, what is in each, and what it is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coalign.weights.convert import huggingface, torch_dist
from coalign.weights.convert.files import write_atomically
from coalign.weights.convert.huggingface import FileTensor
from coalign.weights.convert.request import ConversionRequest
from coalign.weights.convert.sources import (
    HF,
    ITERATION,
    OpenedCheckpoint,
    Scratch,
    build_shard,
    copy_bare,
    dtype_keys,
    row_box,
    split_rows,
)
from coalign.weights.convert.torch_dist import PlannedChunk
from coalign.weights.layouts.megatron import MegatronLayout, stages
from coalign.weights.layouts.parallel import Mesh
from coalign.weights.layouts.shards import Shard, ShardBox, Spec, plan

RELEASE = "release"
FILES, SMALL = 16, 512 * 2**20  # at least so many files, unless they would be smaller: processes share them
OPEN = 16  # tensors of the source that are kept at hand; they are mapped, not read
Advance = Callable[[int], None]
Record = dict[str, Any]  # of a file that is written: name, size, xxh3_128, and for chunks their places


class ConversionOutput:
    """Files, by number. ``total``: bytes of all. ``write`` makes one of them and may be called in any process."""

    def __init__(self, request: ConversionRequest, opened: OpenedCheckpoint) -> None:
        self.request, self.opened = request, opened
        self.dtypes = choose_dtypes(request, opened)
        self.sources = opened.family.sources(opened.config)
        self.specs = {name: Spec(source.shape, self.dtypes[name]) for name, source in self.sources.items()}
        self.changes = dict(opened.changes)
        if request.dtype is not None:
            self.changes |= dtype_keys(huggingface.read_config(opened.hf), request.dtype)

    names: list[str]
    total: int
    details: dict[str, Any]  # for the manifest

    def write(self, number: int, folder: Path, advance: Advance) -> Record:
        """Raises OSError for a disk that is full; nothing of the file is left then."""
        raise NotImplementedError

    def finish(self, folder: Path, records: Sequence[Record]) -> None:
        """What stands beside the files."""
        raise NotImplementedError

    def build_shard(self, shards: list[Shard], advance: Advance) -> Iterator[Tensor]:
        """Tensors from the source, each until the next one is asked for."""
        side = self.opened.side
        fetch, scratch = lru_cache(OPEN)(side.fetch), Scratch()
        for shard, (_, moves) in zip(shards, plan(shards, side.ranks), strict=True):
            tensor = build_shard(self.specs, shard, moves, fetch, scratch)
            yield tensor
            advance(tensor.nbytes)


class HuggingFaceOutput(ConversionOutput):
    def __init__(self, request: ConversionRequest, opened: OpenedCheckpoint) -> None:
        super().__init__(request, opened)
        entries = [FileTensor(name, source.stored, self.dtypes[name]) for name, source in self.sources.items()]
        self.files = huggingface.group_by_file(entries, request.file_size)
        self.names = huggingface.file_names(len(self.files))
        self.total = sum(entry.size for entry in entries)
        self.details = {"format": "hf", "dtype": request.dtype}

    def write(self, number: int, folder: Path, advance: Advance) -> Record:
        entries, name = self.files[number], self.names[number]
        shards = [shard for entry in entries for shard in self._blocks(entry)]
        views = zip(shards, self.made(shards, advance), strict=True)
        tensors = (self.sources[shard.like].write(view) for shard, view in views if view.numel())
        with write_atomically(folder / name) as file:
            huggingface.write_safetensors(file, entries, tensors)
        return {"name": name, "size": file.size, "xxh3_128": file.digest}

    def _blocks(self, entry: FileTensor) -> Iterator[Shard]:
        source = self.sources[entry.name]
        if source.shape != entry.shape or source.transposed:  # made whole: its parts are no runs of bytes
            yield huggingface.whole_shard(source)
            return
        for start, stop in split_rows(source.shape, entry.dtype.itemsize):
            box = row_box(source.shape, start, stop)
            own = row_box(source.shape, 0, stop - start)
            shape = (stop - start, *source.shape[1:])
            yield Shard(f"{entry.name}[{start}:{stop}]", shape, entry.name, (ShardBox(entry.name, box, own),))

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
        naming = torch_dist.naming(request.flavour, config)
        chunks = [
            chunk for each in self.parameters.values() for chunk in self._chunks(naming.place(each, config), each)
        ]
        sizes = [torch.Size(chunk.sizes).numel() * chunk.dtype.itemsize for chunk in chunks]
        self.total = sum(sizes)
        limit = min(request.file_size, max(self.total // FILES, SMALL))
        self.files: list[list[PlannedChunk]] = []
        room = 0
        for chunk, size in zip(chunks, sizes, strict=True):
            if not self.files or size > room:
                self.files.append([])
                room = limit
            self.files[-1].append(chunk)
            room -= size
        self.names = [f"{RELEASE}/__{i}_0.distcp" for i in range(len(self.files))]
        places = [place for each in self.parameters.values() for place in naming.objects(each, config)]
        self.objects = [place.object for place in places]
        row_box = self.parameters["embedding.word_embeddings.weight"].shape[0]
        known = {"dtype": request.dtype, "flavour": request.flavour, "padded_vocab_size": row_box}
        self.details = {"format": "torch_dist", **known}

    def _check_layout(self) -> None:
        """ValueError if the model does not divide by the layout that it will be used in."""
        asked, config = self.request, self.opened.config
        try:
            data = asked.expert * asked.expert_tensor
            mesh = Mesh(asked.tensor, asked.pipeline, data, asked.expert, asked.expert_tensor)
            layout = MegatronLayout(config, mesh, stages(config.num_layers, asked.pipeline), asked.flavour)
            if asked.expert > 1 and not config.num_moe_experts:
                raise ValueError("the model has no experts")
            for stage in range(asked.pipeline):
                layout.shards(self.parameters, mesh.at(stage * mesh.tensor * mesh.data))
        except ValueError as problem:
            sizes = f"--tp {asked.tensor} --pp {asked.pipeline} --ep {asked.expert} --etp {asked.expert_tensor}"
            raise ValueError(f"{sizes}: {problem}") from problem

    def _chunks(self, place: torch_dist.TorchDistKey, parameter: Any) -> Iterator[PlannedChunk]:
        dtype = self.dtypes[next(iter(parameter.sources))]
        for start, stop in split_rows(parameter.shape, dtype.itemsize):
            box = row_box(parameter.shape, start, stop)
            own = row_box(parameter.shape, 0, stop - start)
            offsets = (*place.index, start, *(0 for _ in parameter.shape[1:]))
            shape = (stop - start, *parameter.shape[1:])
            like = parameter.pieces[0].name
            shard = Shard(f"{parameter.name}[{start}:{stop}]", shape, like, tuple(parameter.placed(box, own)))
            yield PlannedChunk(place, offsets, shard, (*place.stacked, *parameter.shape), dtype)

    def write(self, number: int, folder: Path, advance: Advance) -> Record:
        chunks = self.files[number]
        tensors = self.made([chunk.shard for chunk in chunks], advance)
        path = folder / self.names[number]
        path.parent.mkdir(exist_ok=True)
        with write_atomically(path) as file:
            places = [
                torch_dist.save(file, copy_bare(tensor).view(chunk.sizes))
                for chunk, tensor in zip(chunks, tensors, strict=True)
            ]
        return {"name": self.names[number], "size": file.size, "xxh3_128": file.digest, "places": places}

    def finish(self, folder: Path, records: Sequence[Record]) -> None:
        torch_dist.write_metadata(folder / RELEASE, self.files, self.objects, records)
        huggingface.copy_others(self.opened.hf, folder / HF, self.changes)
        (folder / ITERATION).write_text(f"{RELEASE}\n")


def choose_dtypes(request: ConversionRequest, opened: OpenedCheckpoint) -> dict[str, torch.dtype]:
    """What each Hugging Face tensor, and what is made of it, is in the output."""
    found = dict(opened.side.dtypes)
    if request.dtype is not None:
        found = dict.fromkeys(found, getattr(torch, request.dtype))
    for parameter in opened.family.parameters(opened.config).values():
        if parameter.dtype is not None:
            found |= dict.fromkeys(parameter.sources, parameter.dtype)
    return found
