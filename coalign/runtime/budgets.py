"""What a prompt may cost: samples, tokens of a response where its row of data says so, and tokens of all of them."""

from __future__ import annotations

import torch

from coalign.config.schema.rollout import RolloutConfig
from coalign.data.batch import Batch
from coalign.data.examples import MARKS
from coalign.types import SEQUENCE_COLUMNS


def with_budgets(prompts: Batch, config: RolloutConfig, samples: int, max_new_tokens: int) -> Batch:
    """The prompts with the columns ``samples`` and ``max_new_tokens`` as far as ``config`` names keys of the rows for
    them; the numbers given are those of rows without the key. Of ``config.group_tokens`` each sample of a prompt has an
    equal share, so that what one may write does not depend on who is first. ValueError for what is no positive number,
    and for a share without a token."""
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
    if config.group_tokens is not None:
        counts = columns.get("samples", torch.full((len(prompts),), samples))
        limits = columns.get("max_new_tokens", torch.full((len(prompts),), max_new_tokens))
        shares = config.group_tokens // counts
        if bool((shares < 1).any()):
            raise ValueError(
                f"rollout.group_tokens is {config.group_tokens}, and a prompt has {int(counts.max())} samples: there "
                "is not one token for each; raise it"
            )
        columns["max_new_tokens"] = torch.minimum(limits, shares).to(SEQUENCE_COLUMNS["max_new_tokens"])
    return prompts.with_(**columns) if columns else prompts
