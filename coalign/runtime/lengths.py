"""How long responses to a prompt were, so that replicas of a policy get shares that take equally long."""

from __future__ import annotations

from typing import Any

import torch

from coalign.data.batch import Batch
from coalign.runtime.curriculum import first_rows, row_key


class Lengths:
    """Mean response lengths (tokens) by the content of a prompt's row; a prompt not seen yet counts as average."""

    def __init__(self) -> None:
        self.known: dict[str, float] = {}

    def expect(self, prompts: Batch) -> Batch:
        """The prompts with the column ``expected_tokens``, at least 1 each."""
        average = sum(self.known.values()) / len(self.known) if self.known else 1.0
        expected = [self.known.get(row_key(row), average) for row in prompts["rows"]]
        return prompts.with_(expected_tokens=torch.tensor(expected).round().clamp(min=1).int())

    def note(self, lengths: Batch) -> None:
        """Learn from what ``response_lengths`` gave."""
        self.known.update(zip(lengths["key"], lengths["length"].tolist(), strict=True))

    def state_dict(self) -> dict[str, Any]:
        return dict(self.known)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.known = dict(state)


def response_lengths(batch: Batch) -> Batch:
    """One row without tokens for each group: ``key`` of its prompt, ``length`` f64, the mean of its responses."""
    groups, member = torch.unique(batch["group"], return_inverse=True)
    chosen = torch.bincount(member[batch.segment[batch["loss_mask"]]], minlength=len(groups))
    length = chosen.double() / torch.bincount(member, minlength=len(groups))
    keys = [row_key(row) for row in first_rows(batch, member)]
    return Batch(torch.zeros(len(groups)), {}, {"length": length, "key": keys})
