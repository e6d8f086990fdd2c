"""Reads rollouts/step_N.safetensors: the tokens of a step's samples, and numbers for each token.

Rows are the lines of samples.jsonl with that step, in their order. The format is that of safetensors: eight bytes with
the length of a JSON header, the header, and the numbers of each tensor end to end. It is read here, and not by the
library, because of one row only its own bytes are needed, and plain Python reads them.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_TYPES = {"I32": "i", "I64": "q", "F32": "f", "U8": "B"}
_LONGEST_HEADER = 100 * 2**20  # bytes; what the library accepts
_MEASURES = ("logprob", "trainer_logprob", "reference_logprob", "advantage", "loss_mask", "weight_version")
# Bounds of coalign.algorithms.divergence, which needs torch.
_LARGEST_K3_EXPONENT = 10.0
_LARGEST_LOG_RATIO = 20.0


def find_rollouts(folder: Path, step: int) -> Path:
    return folder / "rollouts" / f"step_{step}.safetensors"


def read_row(path: Path, row: int) -> dict[str, Any] | None:
    """Return the tokens of one sample; None if the file has fewer rows. ValueError for a damaged file.

    `texts` are those of the tokens alone, `ids` their numbers, and the first `prompt_length` are the prompt.
    `measures` has a number, or null where there is none, for each token: those of the file, and what follows from them:

    - `ratio`: probability of the trainer's policy over the sampler's;
    - `kl`: the estimate k3 of the divergence from the reference (coalign.algorithms.divergence).
    """
    with open(path, "rb") as file:
        tensors = _TensorFile(path, file)
        ends = tensors.read("row_ends")
        if row >= len(ends):
            return None
        start, stop = ends[row - 1] if row else 0, ends[row]
        ids = tensors.read("tokens", start, stop)
        measures = {name: tensors.read(name, start, stop) for name in _MEASURES if name in tensors}
        pieces = _parse_object(tensors.metadata.get("pieces", "{}"), path)
        prompt_length = tensors.read("prompt_length", row, row + 1)[0]
    return {
        "ids": list(ids),
        "texts": [str(pieces.get(str(number), f"[{number}]")) for number in ids],
        "prompt_length": prompt_length,
        "measures": {name: list(map(_round, values)) for name, values in (measures | _derive(measures)).items()},
    }


def _derive(measures: Mapping[str, Sequence[float]]) -> dict[str, Sequence[float]]:
    """Return ratio and KL of each token where the log-probs that they need are there; NaN stays NaN."""
    sampler, trainer, reference = (measures.get(name) for name in _MEASURES[:3])
    found: dict[str, Sequence[float]] = {}
    if sampler is not None and trainer is not None:
        pairs = zip(trainer, sampler, strict=True)
        found["ratio"] = [math.exp(min(new - old, _LARGEST_LOG_RATIO)) for new, old in pairs]
    policy = sampler if trainer is None else trainer
    if policy is not None and reference is not None:
        found["kl"] = [_estimate_k3(own - other) for own, other in zip(policy, reference, strict=True)]
    return found


def _estimate_k3(distance: float) -> float:
    exponent = -distance if math.isnan(distance) else min(-distance, _LARGEST_K3_EXPONENT)
    return math.expm1(exponent) - exponent


def _round(value: float) -> float | None:
    """Return six digits; None for NaN and infinities, which JSON does not have."""
    if isinstance(value, int):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


class _TensorFile:
    """The header of a safetensors file, and parts of its tensors. ValueError for a file that is none, or was cut."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path, self._file = path, file
        size = path.stat().st_size
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if length > min(_LONGEST_HEADER, size - 8):
            raise ValueError(f"{path} is no safetensors file, or was cut")
        header = _parse_object(file.read(length), path)
        self.metadata: dict[str, Any] = header.pop("__metadata__", {})
        self._first = 8 + length
        self._tensors: dict[str, tuple[str, int, int]] = {}  # type, first byte, length
        try:
            for name, tensor in header.items():
                begin, end = tensor["data_offsets"]
                if not 0 <= begin <= end <= size - self._first:
                    raise ValueError(f"{path}: {name} ends after the end of the file")
                self._tensors[name] = tensor["dtype"], begin, end - begin
        except (KeyError, TypeError) as problem:
            raise ValueError(f"{path} is no safetensors file: {name} has no dtype or no data_offsets") from problem

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def read(self, name: str, start: int = 0, stop: int | None = None) -> array[Any]:
        """Return the elements start..stop of a tensor of one dimension."""
        if name not in self._tensors:
            raise ValueError(f"{self.path} has no tensor `{name}`; it has {', '.join(self._tensors)}")
        dtype, begin, length = self._tensors[name]
        if dtype not in _TYPES:
            raise ValueError(f"{self.path}: {name} is {dtype}; expected one of {', '.join(_TYPES)}")
        values = array(_TYPES[dtype])
        count = length // values.itemsize
        stop = count if stop is None else stop
        if not 0 <= start <= stop <= count:
            raise ValueError(f"{self.path}: {name} has {count} elements, and a row is {start} to {stop}")
        self._file.seek(self._first + begin + start * values.itemsize)
        values.frombytes(self._file.read((stop - start) * values.itemsize))
        if sys.byteorder == "big":
            values.byteswap()
        return values


def _parse_object(text: str | bytes, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{path}: its header is no JSON") from problem
    if not isinstance(value, dict):
        raise ValueError(f"{path}: its header is a {type(value).__name__}; expected an object")
    return value
