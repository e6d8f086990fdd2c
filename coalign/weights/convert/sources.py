"""One side of a conversion: what its files hold, as boxes of the views of Hugging Face tensors.

What a source directory is, and its weights as a side.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from coalign.weights import families
from coalign.weights.convert import huggingface, legacy, torch_dist
from coalign.weights.convert import huggingface as fp8
from coalign.weights.convert.request import ConversionRequest
from coalign.weights.families import Family, MegatronConfig, Parameter
from coalign.weights.layouts.shards import Box, Fetch, Move, Shape, Shard, Spec, reshard
from coalign.weights.sync.buckets import tensor_bytes

BLOCK = 16 * 2**20  # bytes that are made at a time


class CheckpointReader(Protocol):
    """``ranks``: what each file, or each rank's file, holds. ``dtypes``: of each Hugging Face tensor, as it is stored
    here."""

    ranks: Sequence[Sequence[Shard]]
    dtypes: Mapping[str, torch.dtype]

    def fetch(self, rank: int, name: str) -> Tensor:
        """A tensor of a file, mapped into memory rather than read."""


class Scratch:
    """Memory for one tensor at a time: the next one takes its place. New memory would cost a page fault a page."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def __call__(self, shape: Shape, *, dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        if size > len(self._bytes):
            self._bytes = torch.empty(size, dtype=torch.uint8)
        return self._bytes[:size].view(dtype).view(shape)


def build_shard(
    specs: Mapping[str, Spec], shard: Shard, moves: Sequence[Move], fetch: Fetch, scratch: Scratch
) -> Tensor:
    """A shard's tensor, until the next one is made; where it is one box of one tensor of a file and of its type, a view
    of that."""
    dtype = specs[shard.like].dtype
    if len(moves) == 1 and moves[0].given == tuple((0, size) for size in shard.shape):
        found = fetch(moves[0].rank, moves[0].source)[tuple(slice(*ends) for ends in moves[0].taken)]
        return found.reshape(shard.shape).to(dtype)
    return next(tensor for _, tensor in reshard(specs, [shard], {shard.name: moves}, fetch, scratch))


def copy_bare(tensor: Tensor) -> Tensor:
    """The same bytes as a storage of their own: of a view, torch.save writes all that it is a view of."""
    return torch.from_numpy(tensor_bytes(tensor)).view(tensor.dtype).view(tensor.shape)


def split_rows(shape: Shape, itemsize: int, limit: int = BLOCK) -> Iterator[tuple[int, int]]:
    """Rows from … to …, as many at a time as fit into ``limit`` bytes, at least one."""
    row_box, row = shape[0], itemsize
    for size in shape[1:]:
        row *= size
    step = max(1, limit // max(row, 1))
    for start in range(0, row_box, step):
        yield start, min(start + step, row_box)


def row_box(shape: Shape, start: int, stop: int) -> Box:
    """The box of some rows."""
    return ((start, stop), *((0, size) for size in shape[1:]))


ITERATION = "latest_checkpointed_iteration.txt"
HF = "hf"  # in a Megatron directory: what else the Hugging Face directory had


@dataclass(frozen=True, slots=True)
class OpenedCheckpoint:
    """``format``: `hf`, `torch_dist` or `legacy`. ``hf``: where config.json and the tokenizer are. ``files``: with the
    weights. ``details``: for the manifest. ``changes``: what config.json says otherwise of what is written."""

    format: str
    hf: Path
    family: Family
    config: MegatronConfig
    files: list[Path]
    side: CheckpointReader
    details: Mapping[str, Any]
    changes: Mapping[str, Any] = field(default_factory=dict)


def open_source(request: ConversionRequest) -> OpenedCheckpoint:
    """ValueError for what is no model that can be read, and for whatever does not fit its config.json."""
    if not request.source.is_dir():
        raise FileNotFoundError(f"{request.source} is no directory")
    folder = find_iteration(request.source)
    if folder is None:
        return _huggingface(request)
    return _megatron(request, folder)


def find_iteration(source: Path) -> Path | None:
    """The folder of a Megatron checkpoint's newest iteration, or the one given; None: it is no such checkpoint."""
    if (source / torch_dist.METADATA).is_file() or legacy.is_legacy(source):
        return source
    tracker = source / ITERATION
    if not tracker.is_file():
        return None
    newest = tracker.read_text().strip()
    folder = source / (newest if newest == "release" else f"iter_{int(newest):07d}")
    if not folder.is_dir():
        raise ValueError(f"{tracker} says {newest!r}, and {folder} is not there")
    return folder


def _huggingface(request: ConversionRequest) -> OpenedCheckpoint:
    hf = huggingface.read_config(request.source)
    family = families.of(hf)
    config = family.config(hf)
    changes = _unquantised(hf)
    reader = huggingface.HuggingFaceReader(request.source, pickled=request.pickles)
    beyond = [name for name in reader.names if (family.layer_of(name) or 0) >= config.num_layers]
    if hf.get("num_nextn_predict_layers") and beyond:
        if not request.without_mtp:
            raise ValueError(
                f"{request.source}: layers from {config.num_layers} on predict further tokens, {len(beyond)} tensors "
                f"({beyond[0]} …), and are not converted: --without-mtp leaves them out"
            )
        changes["num_nextn_predict_layers"] = 0
    left_out = beyond if request.without_mtp else []
    stored = family.stored_names(config, [name for name in reader.names if name not in set(left_out)])
    side = huggingface.HuggingFaceWeights(reader, family.sources(config), stored)
    return OpenedCheckpoint("hf", request.source, family, config, reader.files, side, {"left_out": left_out}, changes)


def _unquantised(hf: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json says otherwise of weights that are read from 8 bits. ValueError for other quantisations."""
    how = hf.get("quantization_config")
    if how is None:
        return {}
    if (how.get("quant_method"), how.get("weight_block_size")) != ("fp8", [fp8.BLOCK, fp8.BLOCK]):
        raise ValueError(
            f"config.json: 'quantization_config' is {how}; what can be read is 'quant_method' 'fp8' with "
            f"'weight_block_size' [{fp8.BLOCK}, {fp8.BLOCK}]"
        )
    return {"quantization_config": None, **dtype_keys(hf, "bfloat16")}


def dtype_keys(hf: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """How a config.json says what its weights are."""
    return dict.fromkeys([key for key in ("dtype", "torch_dtype") if key in hf] or ["dtype"], dtype)


def _megatron(request: ConversionRequest, folder: Path) -> OpenedCheckpoint:
    places = [request.hf] if request.hf else [request.source / HF, request.source.parent / HF]
    place = next((each for each in places if (each / "config.json").is_file()), None)
    if place is None:
        raise ValueError(
            f"{request.source} does not say what model it is: --hf names a Hugging Face directory of the same model "
            "(config.json, tokenizer)"
        )
    hf = huggingface.read_config(place)
    family = families.of(hf)
    config = family.config(hf)
    side: CheckpointReader
    if legacy.is_legacy(folder):
        ranks = legacy.read_ranks(folder)
        side = legacy.LegacyWeights(ranks, list_parameters(family, config, legacy.count_vocabulary_rows(ranks)), config)
        return OpenedCheckpoint("legacy", place, family, config, [rank.path for rank in ranks], side, {})
    if not (folder / torch_dist.METADATA).is_file():
        raise ValueError(f"{folder} has neither mp_rank_* nor {torch_dist.METADATA}: no format that can be read")
    side = torch_dist.TorchDistWeights(folder, list_parameters(family, config, torch_dist.vocabulary(folder)), config)
    files = sorted({stored.file for stored in side.chunks.values()})
    return OpenedCheckpoint("torch_dist", place, family, config, files, side, {"flavour": side.naming.flavour})


def list_parameters(family: Family, config: MegatronConfig, row_box: int) -> dict[str, Parameter]:
    """The parameters, with a vocabulary of so many rows. ValueError for fewer than the real ones."""
    if row_box < config.vocab_size:
        raise ValueError(f"the word embedding has {rows} rows, config.json says vocab_size {config.vocab_size}")
    return family.parameters(config, vocab_divisor=row_box)
