"""Reads the headers of a Hugging Face model's files: names, types and shapes of tensors, and no values.

Files are not trusted. One that is no weights (a pointer of Git LFS, a web page, half a download) is refused by its
name, with what gets the right one.
"""

from __future__ import annotations

import json
import os
import zipfile
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from coalign.files import describe_problem, list_weight_files, open_regular, refuse_foreign

SAFETENSORS, PICKLE, ADAPTERS = "model.safetensors", "pytorch_model.bin", "adapter_model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the limit of the format
BITS = {"BOOL": 8, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BF16": 16} | {
    f"{letter}{bits}": bits for letter in "FIU" for bits in (8, 16, 32, 64)
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt")
TOKENIZER_ENDINGS = (".model", ".tiktoken")  # vocabularies with other names
TEXTS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class StoredTensor(NamedTuple):
    """Type (as safetensors calls it) and shape of a tensor in a file."""

    dtype: str
    shape: tuple[int, ...]


def check_model_files(folder: Path) -> None:
    """Refuse a directory whose configuration, tokenizer or weights are something else. No values are read. Raises
    ValueError that names the file, its content, and the remedy."""
    for name in TEXTS:
        if (folder / name).is_file():
            refuse_foreign(folder / name)
    if read_stored(folder) is None:
        raise ValueError(f"'{folder}' has no weights ({SAFETENSORS}){_explain_absence(folder)}")


def has_weights(folder: Path) -> bool:
    """Whether a directory has a file of weights, or an index of some."""
    return any(list_weight_files(folder, single) for single in (SAFETENSORS, PICKLE))


def check_adapter_files(folder: Path) -> None:
    """Refuse a directory whose adapters are something else; one with other files than peft's is left to its reader."""
    if (folder / "adapter_config.json").is_file():
        refuse_foreign(folder / "adapter_config.json")
    read_stored(folder, ADAPTERS)


def read_stored(folder: Path, single: str = SAFETENSORS) -> dict[str, StoredTensor] | None:
    """Read which tensors the safetensors files of a directory hold, by name; None if it has no weights. Empty for
    weights in a pickle, of which only the form is checked. Raises ValueError for damaged or foreign files."""
    if files := list_weight_files(folder, single):
        return {name: tensor for file in files for name, tensor in read_header(file).items()}
    pickles = list_weight_files(folder, PICKLE) if single == SAFETENSORS else []
    for file in pickles:
        _check_pickle(file)
    return {} if pickles else None


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Read names, types and shapes of the tensors of a safetensors file, whose size has to fit them. Raises ValueError,
    naming the file and what it is, for any other file, and OSError."""
    with open_regular(path) as file:
        size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
        text = file.read(length) if 2 <= length <= min(MAX_HEADER_BYTES, size - 8) else b""
    if not text.startswith(b"{"):
        _refuse_other_formats(path)
        raise ValueError(f"{path} is no safetensors file, or a damaged one of {size:,} bytes; fetch it again")
    try:
        header = json.loads(text)
        stored = {name: _read_entry(entry) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} has no valid header of safetensors ({describe_problem(error)})") from error
    end = 0
    for (start, stop), tensor in sorted(stored.values()):
        bits = BITS.get(tensor.dtype.split("_")[0], BITS.get(tensor.dtype))
        if start != end or stop < start or (bits and 8 * (stop - start) != prod(tensor.shape) * bits):
            raise ValueError(f"{path} is damaged: the tensors of its header do not lie one after the other")
        end = stop
    if 8 + length + end != size:
        raise ValueError(
            f"{path} has {size:,} bytes, and {8 + length + end:,} are what its header tells of: it is cut off or "
            "damaged; fetch it again"
        )
    return {name: tensor for name, (_, tensor) in stored.items()}


def _read_entry(entry: Any) -> tuple[tuple[int, int], StoredTensor]:
    start, stop = entry["data_offsets"]
    shape = tuple(entry["shape"])
    numbers = (*shape, start, stop)
    if not isinstance(entry["dtype"], str) or any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"a tensor {entry!s:.80}")
    return (start, stop), StoredTensor(entry["dtype"], shape)


def _check_pickle(path: Path) -> None:
    """Refuse a file that is not of `torch.save`, or is cut off. Nothing is unpickled."""
    refuse_foreign(path)
    with open_regular(path) as file:
        start = file.read(4)
    if not start.startswith((b"PK", b"\x80")) or (start.startswith(b"PK") and not zipfile.is_zipfile(path)):
        raise ValueError(f"{path} is no file of torch.save, or one that is cut off; fetch it again")


def _refuse_other_formats(path: Path) -> None:
    """Raise ValueError for a file that is called safetensors, and has another known format."""
    refuse_foreign(path)
    with open_regular(path) as file:
        start = file.read(4)
    if start.startswith(b"GGUF"):
        raise ValueError(f"{path} is a GGUF file: give it the ending .gguf, and `load` that file")
    if start.startswith((b"PK", b"\x80")):
        raise ValueError(f"{path} is a file of torch.save; called {PICKLE} it is loaded, as tensors alone")


def _explain_absence(folder: Path) -> str:
    """Say what a directory without weights holds instead."""
    if (folder / ADAPTERS).is_file() or (folder / "adapter_config.json").is_file():
        return f"; it holds adapters: load the model, and these by `lora.load: {folder}`"
    if shards := sorted(file.name for file in folder.glob("*.safetensors")):
        return f"; of {', '.join(shards[:3])} nothing says what they hold: {SAFETENSORS}.index.json is missing"
    if files := sorted(folder.glob("*.gguf")):
        return f"; a GGUF file is loaded by its path: {files[0]}"
    return "; the download seems to be incomplete"


def has_tokenizer(folder: Path) -> bool:
    """Whether a directory has the vocabulary of a tokenizer."""
    named = any((folder / name).is_file() for name in (*TOKENIZER_FILES, "tekken.json"))
    return named or any(file.suffix in TOKENIZER_ENDINGS for file in folder.iterdir())


def check_tokenizer_files(folder: Path) -> None:
    """Refuse a directory without a tokenizer, and files of one that are something else."""
    if not has_tokenizer(folder):
        raise ValueError(
            f"'{folder}' has no tokenizer (none of {', '.join(TOKENIZER_FILES)}); name a directory that has one, such "
            "as that of the model's origin, by the key `tokenizer`: models.policy.tokenizer, models.trainer.tokenizer"
        )
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", *TOKENIZER_FILES):
        file = folder / name
        if file.is_file() and (name == "tokenizer.json" or not (folder / "tokenizer.json").is_file()):
            refuse_foreign(file)
