"""Tiny batches of zeros, one for each kind of data: `coalign check` sends them through a flow."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from coalign.data.batch import Batch
from coalign.types import SEQUENCE_COLUMNS

PROMPT, RESPONSE = 3, 3  # tokens


def prompts() -> Batch:
    """Two prompts of two and three tokens."""
    return Batch(torch.tensor([2, 3])).with_(
        tokens=torch.zeros(5, dtype=torch.int32), group=torch.arange(2), rows=[{}, {}]
    )


def conversations() -> Batch:
    """Two conversations of six tokens, half of them learned."""
    return _make_responses([0, 1])


def documents() -> Batch:
    """Two documents; the first is in two pieces."""
    batch = _make_responses([0, 0, 1], index=[0, 1, 0], prompt_length=[1, 1, 1])
    return batch.with_(loss_mask=torch.tensor([False, *[True] * (PROMPT + RESPONSE - 1)] * 3))


def preferences() -> Batch:
    """Two prompts, each with a chosen and a rejected response."""
    return _make_responses([0, 0, 1, 1], index=[0, 1] * 2, preference=[1, 0] * 2, margin=[0] * 4)


def labelled() -> Batch:
    """Two prompts, one with a desirable response and one with an undesirable one."""
    return _make_responses([0, 1], index=[0, 0], preference=[1, 0])


def steps() -> Batch:
    """Two solutions of three steps."""
    batch = _make_responses([0, 1], index=[0, 0])
    total = batch.tokens_total
    return batch.with_(label=torch.zeros(total), candidates=torch.zeros(total, 2, dtype=torch.int32))


def _make_responses(group: list[int], **columns: list[int]) -> Batch:
    """Prompts with responses, whose tokens are learned."""
    n = len(group)
    columns = {"group": group, "prompt_length": [PROMPT] * n} | columns
    return Batch(torch.full((n,), PROMPT + RESPONSE)).with_(
        tokens=torch.zeros(n * (PROMPT + RESPONSE), dtype=torch.int32),
        loss_mask=torch.tensor(([False] * PROMPT + [True] * RESPONSE) * n),
        rows=[{} for _ in range(n)],
        **{name: torch.tensor(column, dtype=SEQUENCE_COLUMNS[name]) for name, column in columns.items()},
    )


STANDINS: Mapping[str, Callable[[], Batch]] = {
    "prompts": prompts,
    "conversations": conversations,
    "documents": documents,
    "preferences": preferences,
    "labelled": labelled,
    "steps": steps,
}
