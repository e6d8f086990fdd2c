"""Hugging Face directories: a reader of safetensors, FP8 weights and `.bin` pickles, and a streaming writer.

FP8 weights have a scale per block (DeepSeek V3, arXiv 2412.19437). They are read, never written.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from coalign.files import list_weight_files, read_model_config
from coalign.weights.model_files import read_header
from coalign.weights.sync.checksums import tensor_bytes
from coalign_megatron.convert import legacy
from coalign_megatron.convert.files import HashedFile
from coalign_megatron.families.family import HuggingFaceTensor
from coalign_megatron.layouts.shards import Shape, Shard, ShardBox

SCALES = "_scale_inv"  # suffix of the scales' name
BLOCK = 128  # rows and columns per scale
DEQUANTIZED_DTYPE = torch.bfloat16  # FP8 weights are read as this


def read_fp8(name: str, weight: Tensor, scales: Tensor) -> Tensor:
    """Return ``weight`` [R, C] float8 times ``scales`` f32[⌈R / 128⌉, ⌈C / 128⌉] as bfloat16.

    The product is computed in float32. Raises ValueError for scales of another shape.
    """
    blocks = tuple(-(-size // BLOCK) for size in weight.shape)
    if tuple(scales.shape) != blocks:
        raise ValueError(
            f"'{name}{SCALES}' has the shape {list(scales.shape)}; '{name}' {list(weight.shape)} in blocks of "
            f"{BLOCK} × {BLOCK} has {list(blocks)}"
        )
    product = torch.empty(weight.shape, dtype=DEQUANTIZED_DTYPE)
    for block, row in enumerate(scales.float()):
        rows = slice(block * BLOCK, (block + 1) * BLOCK)
        product[rows] = weight[rows].float() * row.repeat_interleave(BLOCK)[: weight.shape[1]]
    return product


SAFETENSORS, BIN = "model.safetensors", "pytorch_model.bin"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json", ".distcp")
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def copy_others(source: Path, target: Path, changes: Mapping[str, Any]) -> None:
    """Copy everything but weights from a model directory: configurations, tokenizer, code, licence.

    ``changes``: new values of keys of config.json; None removes a key.
    """
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.startswith(".") and not file.name.endswith(WEIGHTS):
            shutil.copyfile(file, target / file.name)
    if changes:
        config = {key: value for key, value in {**read_model_config(target), **changes}.items() if value is not None}
        text = json.dumps(config, indent=2, ensure_ascii=False)
        (target / "config.json").write_text(text + "\n", encoding="utf-8")


class HuggingFaceReader:
    """The tensors of a directory, mapped into memory. FP8 weights with scales are read as bfloat16.

    ``pickled``: allow `.bin` files. Raises ValueError naming a file that is missing, cut off, or not allowed.
    """

    def __init__(self, folder: Path, *, pickled: bool) -> None:
        self.folder = folder
        self.files = self._files(pickled)
        self._open: dict[Path, Any] = {}
        self._files_by_name = {name: file for file in self.files for name in list(self._open_file(file).keys())}
        scales = {name + SCALES for name in self._files_by_name}
        self.names = [name for name in self._files_by_name if name not in scales]

    def _files(self, pickled: bool) -> list[Path]:
        for single in (SAFETENSORS, *((BIN,) if pickled else ())):
            if files := list_weight_files(self.folder, single):
                return files
        bins = sorted(file.name for file in self.folder.glob("*.bin"))
        hint = f"; there are pickles ({bins[0]} …): --pickles reads them" if bins else ""
        raise ValueError(f"'{self.folder}' has no {SAFETENSORS} and no index of several{hint}")

    def _open_file(self, file: Path) -> Any:
        if file not in self._open:
            try:
                self._open[file] = (
                    legacy.load_pickle(file, mmap=True) if file.suffix == ".bin" else safe_open(file, "pt").__enter__()
                )
            except SafetensorError as problem:
                raise ValueError(f"{file} cannot be read, is it cut off? ({_explain(file, problem)})") from problem
        return self._open[file]

    def is_scaled(self, name: str) -> bool:
        """Return whether a tensor is in FP8 with scales."""
        return name in self._files_by_name and name + SCALES in self._files_by_name

    def tensor(self, name: str) -> Tensor:
        if self.is_scaled(name):
            return read_fp8(name, self._list_stored(name), self._list_stored(name + SCALES))
        return self._list_stored(name)

    def like(self, name: str) -> tuple[Shape, torch.dtype]:
        """Return shape and dtype of ``tensor(name)``. Raises ValueError for FP8 without scales."""
        tensor = self._list_stored(name)
        if not self.is_scaled(name):
            if tensor.dtype.itemsize == 1 and tensor.is_floating_point():
                raise ValueError(f"{self.folder}: '{name}' is {tensor.dtype}, but there is no '{name}{SCALES}'")
            return tuple(tensor.shape), tensor.dtype
        return tuple(tensor.shape), DEQUANTIZED_DTYPE

    def _list_stored(self, name: str) -> Tensor:
        file = self._files_by_name[name]
        opened = self._open_file(file)
        return opened[name] if file.suffix == ".bin" else opened.get_tensor(name)


def _explain(file: Path, problem: SafetensorError) -> Exception:
    """Describe the damage of a file, better than safetensors does where that is known."""
    try:
        read_header(file)
    except ValueError as reason:
        return reason
    return problem


class HuggingFaceWeights:
    """The weights of a directory.

    ``sources``: all tensors of the model. ``stored``: their names in the files.
    """

    def __init__(
        self, reader: HuggingFaceReader, sources: Mapping[str, HuggingFaceTensor], stored: Mapping[str, str]
    ) -> None:
        self.reader, self.sources, self.stored = reader, sources, stored
        self.ranks = [[whole_shard(source) for source in sources.values()]]
        self.dtypes: dict[str, torch.dtype] = {}
        wrong = []
        for name, source in sources.items():
            shape, self.dtypes[name] = reader.like(stored[name])
            if shape != source.stored:
                wrong.append(f"'{stored[name]}' {list(shape)} (config.json: {list(source.stored)})")
        if wrong:
            raise ValueError(f"{reader.folder}: shapes that differ from config.json: {', '.join(wrong)}")

    def fetch(self, rank: int, name: str) -> Tensor:
        return self.sources[name].read(self.reader.tensor(self.stored[name]))


def whole_shard(source: HuggingFaceTensor) -> Shard:
    """Return a tensor's whole view as one shard."""
    box = tuple((0, size) for size in source.shape)
    return Shard(source.name, source.shape, source.name, (ShardBox(source.name, box, box),))


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of an output file, with its stored shape."""

    name: str
    shape: Shape
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_safetensors(file: HashedFile, entries: list[FileTensor], tensors: Iterator[Tensor]) -> None:
    """Write one safetensors file. ``tensors`` are consecutive blocks of rows of the entries."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for entry in entries:
        header[entry.name] = {
            "dtype": DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [at, at + entry.size],
        }
        at += entry.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors:
        file.write(tensor_bytes(tensor).data)
    if file.size != (expected := 8 + len(text) + at):
        raise AssertionError(f"{file.size} bytes were written, the header says {expected}")


def write_index(folder: Path, files: Mapping[str, list[FileTensor]]) -> None:
    """Write the index of tensors, if there are several files."""
    if len(files) > 1:
        names = {entry.name: file for file, entries in files.items() for entry in entries}
        total = sum(entry.size for entries in files.values() for entry in entries)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
        (folder / f"{SAFETENSORS}.index.json").write_text(json.dumps(index, indent=2) + "\n")
