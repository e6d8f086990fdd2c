"""Groups of samples that a filter lets through, whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from coalign.cluster.apply import bind as bind_columns
from coalign.cluster.apply import name_of
from coalign.config.functions import bind, resolve
from coalign.config.schema.rollout import FilterConfig
from coalign.data.batch import Batch
from coalign.types import Stats, Total


def filter_function(config: FilterConfig) -> partial[Any]:
    """The filter with its arguments checked. A short name is one of coalign.algorithms.filters.

    Raises ConfigError for wrong arguments, ValueError if there is no such function.
    """
    fn = resolve(config.fn, "coalign.algorithms.filters")
    return partial(fn, **bind(fn, config.arguments, "filter"))


def filter_groups(batch: Batch, *, keep: Callable[..., Tensor], arguments: Mapping[str, Any]) -> tuple[Batch, Stats]:
    """The groups all of whose samples ``keep(columns, **arguments) -> bool[N]`` says True of.

    Metrics: filter/kept and filter/dropped, in groups. ValueError for a column that nobody produced, or another result.
    """
    if not len(batch):
        return batch, {}
    kept = keep(*bind_columns(keep, batch), **arguments)
    if not isinstance(kept, Tensor) or kept.dtype != torch.bool or kept.shape != (len(batch),):
        found = f"{kept.dtype} {list(kept.shape)}" if isinstance(kept, Tensor) else type(kept).__name__
        raise ValueError(f"filter `{name_of(keep)}` returned {found}; expected torch.bool [{len(batch)}]")
    groups, member = torch.unique(batch["group"], return_inverse=True)
    whole = torch.ones(len(groups), dtype=torch.bool)
    whole[member[~kept]] = False
    stats = {"filter/kept": Total(float(whole.sum())), "filter/dropped": Total(float((~whole).sum()))}
    return batch.select(whole[member]), stats
