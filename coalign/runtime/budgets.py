"""What a prompt may cost, where its row of data says so: samples, and tokens of a response."""

from __future__ import annotations

import torch

from coalign.config.schema.rollout import RolloutConfig
from coalign.data.batch import Batch
from coalign.data.examples import MARKS
from coalign.types import SEQUENCE_COLUMNS


def with_budgets(prompts: Batch, config: RolloutConfig, samples: int, max_new_tokens: int) -> Batch:
    """The prompts with the columns ``samples`` and ``max_new_tokens`` as far as ``config`` names keys of the rows for
    them; the numbers given are those of rows without the key. ValueError for what is no positive number."""
    keys = {"samples": (config.samples_key, samples), "max_new_tokens": (config.max_new_tokens_key, max_new_tokens)}
    columns = {}
    for name, (key, otherwise) in keys.items():
        if key is not None:
            numbers = [row.get(key, otherwise) for row in prompts["rows"]]
            for row, number in zip(prompts["rows"], numbers, strict=True):
                if not isinstance(number, int) or number < 1:
                    source, place = (row.get(mark, "?") for mark in MARKS)
                    raise ValueError(
                        f"rollout.{name}_key: row {place} of {source} has {number!r} under '{key}'; expected a whole "
                        "number > 0"
                    )
            columns[name] = torch.tensor(numbers, dtype=SEQUENCE_COLUMNS[name])
    return prompts.with_(**columns) if columns else prompts
