"""Tokens of one sample, with what follows from its log-probs: importance ratio and divergence from the reference."""

from __future__ import annotations

import json
import math
import sys
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, deserialize

from coalign.files import describe_problem, read_bounded
from coalign.run_files.rollouts import FORMAT, find_rollouts
from coalign_board.catalog import find_within

_TYPES = {"I32": "i", "I64": "q", "F32": "f", "U8": "B"}
_MAX_FILE_BYTES = 256 * 2**20
_ROW_TENSORS = ("tokens", "row_ends", "prompt_length")
# Bounds of coalign.algorithms.divergence, which needs torch.
_LARGEST_K3_EXPONENT = 10.0
_LARGEST_LOG_RATIO = 20.0


def read_row(folder: Path, step: int, row: int) -> dict[str, Any] | None:
    """Return the tokens of one row of a step; None without them. ValueError for a damaged file.

    `texts` are those of the tokens alone, `ids` their numbers, and the first `prompt_length` are the prompt.
    `measures` has a number, or null where there is none, for each token: the columns of the file
    (coalign.run_files.rollouts) that have any for this row, and what follows from them:

    - `ratio`: probability of the trainer's policy over the sampler's;
    - `kl`: the estimate k3 of the divergence from the reference (coalign.algorithms.divergence).
    """
    path = find_within(folder, find_rollouts(folder, step))
    if not path.exists():
        return None
    try:
        tensors, pieces = _read_tensors(path)
        if row >= len(tensors["row_ends"]):
            return None
        start, stop = int(tensors["row_ends"][row - 1]) if row else 0, int(tensors["row_ends"][row])
        ids = tensors["tokens"][start:stop].tolist()
        prompt_length = int(tensors["prompt_length"][row])
    except (SafetensorError, ValueError, LookupError, OverflowError, RecursionError, AttributeError) as problem:
        raise ValueError(f"rollouts/{path.name} holds no rollouts: {describe_problem(problem)}") from problem
    columns = {name: tensors[name][start:stop].tolist() for name in tensors.keys() - _ROW_TENSORS}
    measures = [(name, list(map(_round, values))) for name, values in (columns | derive_measures(columns)).items()]
    return {
        "ids": ids,
        "texts": [pieces.get(str(number), f"[{number}]") for number in ids],
        "prompt_length": prompt_length,
        "measures": {name: values for name, values in measures if any(value is not None for value in values)},
    }


def _read_tensors(path: Path) -> tuple[dict[str, array[Any]], dict[str, str]]:
    """Return the tensors of a file and the texts of its tokens, without numpy, which takes 11 MB of memory."""
    data = read_bounded(path, _MAX_FILE_BYTES)
    tensors = {}
    for name, tensor in deserialize(data):
        tensors[name] = array(_TYPES[tensor["dtype"]])
        tensors[name].frombytes(tensor["data"])
        if sys.byteorder == "big":
            tensors[name].byteswap()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])  # which `deserialize` does not return
    metadata = header["__metadata__"]
    if metadata["format"] != FORMAT:
        raise ValueError(f"its format is {metadata['format']!r}; expected {FORMAT!r}")
    pieces = json.loads(metadata["pieces"])
    if not isinstance(pieces, dict):
        raise ValueError(f"its pieces are {type(pieces).__name__}; expected an object")
    return tensors, {number: str(text) for number, text in pieces.items()}


def derive_measures(columns: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return ratio and KL of each token where the log-probs that they need are there; NaN stays NaN."""
    sampler, trainer, reference = (columns.get(f"{name}logprob") for name in ("", "trainer_", "reference_"))
    measures: dict[str, list[float]] = {}
    if sampler is not None and trainer is not None:
        pairs = zip(trainer, sampler, strict=True)
        measures["ratio"] = [math.exp(min(new - old, _LARGEST_LOG_RATIO)) for new, old in pairs]
    policy = sampler if trainer is None else trainer
    if policy is not None and reference is not None:
        measures["kl"] = [_estimate_k3(new - ref) for new, ref in zip(policy, reference, strict=True)]
    return measures


def _estimate_k3(distance: float) -> float:
    exponent = -distance if math.isnan(distance) else min(-distance, _LARGEST_K3_EXPONENT)
    return math.expm1(exponent) - exponent


def _round(value: float) -> float | None:
    """Return six digits; None for NaN and infinities, which JSON does not have."""
    if isinstance(value, int):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None
