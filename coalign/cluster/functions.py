"""Calls pure functions on columns of batches: positional parameters name columns, keyword-only ones are settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coalign.config.functions import list_columns
from coalign.data.batch import Batch
from coalign.types import Metric, Stats

if TYPE_CHECKING:
    from coalign.cluster.future import BatchRef

DERIVED = ("segment", "lengths")  # columns that every batch has


def apply_columns(
    function: Callable[..., Any], batch: Batch, keywords: Mapping[str, Any]
) -> tuple[dict[str, Any], Stats]:
    """Call ``function`` on columns of a batch; returns its columns and its metrics.

    The function returns a mapping: tensors and lists are columns, values of the metrics' types are metrics. Raises
    ValueError for a missing column and for a result of another kind.
    """
    result = function(*bind_columns(function, batch), **keywords)
    if not isinstance(result, Mapping):
        raise ValueError(
            f"{name_of(function)} returned a {type(result).__name__}; expected a dict of columns and metrics"
        )
    columns, metrics, others = sort_result(result)
    if others:
        raise ValueError(
            f"{name_of(function)} returned {', '.join(f'{k!r} of type {type(v).__name__}' for k, v in others.items())}"
            "; expected tensors or lists (columns) and Stat, Max, Total or EffectiveSize (metrics)"
        )
    return columns, metrics


def transform_batches(
    function: Callable[..., Any], batches: Sequence[Batch], keywords: Mapping[str, Any]
) -> tuple[Batch, Stats]:
    """Call ``function`` on whole batches; it returns a batch, or a batch and metrics. ValueError for anything else."""
    result = function(*batches, **keywords)
    batch, stats = result if isinstance(result, tuple) else (result, {})
    if not isinstance(batch, Batch):
        raise ValueError(f"{name_of(function)} returned a {type(batch).__name__}; expected a Batch")
    return batch, stats


def merge_columns(batches: Sequence[Batch]) -> Batch:
    """Merge the columns of batches of the same sequences; a later column replaces an earlier one of the same name."""
    base = batches[0]
    for position, other in enumerate(batches[1:], start=2):
        check_same_sequences(base, other, position)
    token, sequence = dict(base.token), dict(base.sequence)
    for other in batches[1:]:
        token = {k: v for k, v in token.items() if k not in other.sequence} | dict(other.token)
        sequence = {k: v for k, v in sequence.items() if k not in other.token} | dict(other.sequence)
    return Batch(base.lengths, token, sequence)


def check_same_sequences(base: Batch | BatchRef, other: Batch | BatchRef, position: int) -> None:
    """ValueError if the batch at this ``position`` (from 1) has other lengths than the first one."""
    if not torch.equal(base.lengths, other.lengths):
        raise ValueError(
            f"batches of one apply must hold the same sequences: the first has {len(base)} with {base.tokens_total} "
            f"tokens, number {position} has {len(other)} with {other.tokens_total}"
        )


def bind_columns(function: Callable[..., Any], batch: Batch) -> list[Any]:
    """The columns that the function's positional parameters name; a column with a default may be missing."""
    needed, optional = list_columns(function)
    there = {*batch.token, *batch.sequence, *DERIVED}
    for name in needed:
        if name not in there:
            raise ValueError(
                f"{name_of(function)} needs the column '{name}', which nobody produced; "
                f"there are: {', '.join(sorted(there.difference(DERIVED)))}"
            )
    defaults = inspect.signature(function).parameters
    return [batch[name] if name in there else defaults[name].default for name in (*needed, *optional)]


def sort_result(result: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Metric], dict[str, Any]]:
    """Sort the values of a result into (columns, metrics, everything else)."""
    columns = {k: v for k, v in result.items() if isinstance(v, Tensor | list)}
    metrics = {k: v for k, v in result.items() if isinstance(v, Metric)}
    others = {k: v for k, v in result.items() if k not in columns and k not in metrics}
    return columns, metrics, others


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function in messages and metrics."""
    return getattr(function, "__name__", type(function).__name__)
