"""Tokens of one sample, with what follows from its log-probs: importance ratio and divergence from the reference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coalign.board.catalog import find_within

# Bounds of coalign.algorithms.divergence, which needs torch.
_LARGEST_K3_EXPONENT = 10.0
_LARGEST_LOG_RATIO = 20.0


def list_recorded_steps(folder: Path) -> set[int]:
    """Return the steps whose tokens are recorded."""
    from coalign.run_files.rollouts import list_rollout_steps  # numpy: only where samples are looked at

    return set(list_rollout_steps(folder))


def read_row(folder: Path, step: int, row: int) -> dict[str, Any] | None:
    """Return the tokens of one row of a step; None without them. ValueError for a damaged file.

    `texts` are those of the tokens alone, `ids` their numbers, and the first `prompt_length` are the prompt.
    `measures` has a number, or null where there is none, for each token: the columns of the file
    (coalign.run_files.rollouts) that have any for this row, and what follows from them:

    - `ratio`: probability of the trainer's policy over the sampler's;
    - `kl`: the estimate k3 of the divergence from the reference (coalign.algorithms.divergence).
    """
    from coalign.run_files.rollouts import find_rollouts, read_rollouts

    path = find_within(folder, find_rollouts(folder, step))
    if not path.is_file():
        return None
    rollouts = read_rollouts(path)
    if row >= len(rollouts.row_ends):
        return None
    start, stop = int(rollouts.row_ends[row - 1]) if row else 0, int(rollouts.row_ends[row])
    ids: list[int] = rollouts.tokens[start:stop].tolist()
    columns: dict[str, list[float]] = {name: values[start:stop].tolist() for name, values in rollouts.columns.items()}
    measures = [(name, list(map(_round, values))) for name, values in (columns | derive_measures(columns)).items()]
    return {
        "ids": ids,
        "texts": [rollouts.pieces.get(number, f"[{number}]") for number in ids],
        "prompt_length": int(rollouts.prompt_length[row]),
        "measures": {name: rounded for name, rounded in measures if any(value is not None for value in rounded)},
    }


def derive_measures(columns: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return ratio and KL of each token where the log-probs that they need are there; NaN stays NaN."""
    sampler, trainer, reference = (columns.get(f"{name}logprob") for name in ("", "trainer_", "reference_"))
    found: dict[str, list[float]] = {}
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
