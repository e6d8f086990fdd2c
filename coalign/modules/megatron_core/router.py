"""The router of DeepSeek's experts, which looks for them in some groups of experts only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ExpertGroupChoice:
    """A group is judged by its ``best`` best experts. megatron-core counts topk / group_topk of them, which is right
    for version 3 with its own numbers only. It asks this where it would ask for a recorded choice."""

    best: int

    def get_replay_topk(
        self, scores: Tensor, topk: int, groups: int, group_topk: int, _: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        """Of scores [T, E] the greatest ``topk``, and which experts' they are, both [T, topk]."""
        grouped = scores.unflatten(1, (groups, -1))
        of_groups = grouped.topk(min(self.best, grouped.shape[2]), -1).values.sum(-1)
        chosen = torch.zeros_like(of_groups, dtype=torch.bool).scatter(1, of_groups.topk(group_topk).indices, True)
        return grouped.masked_fill(~chosen[:, :, None], -torch.inf).flatten(1).topk(topk)


class GroupedRouter(TopKRouter):
    """``best``: as in ExpertGroupChoice. The biases of experts stay what they are, unless a rate of change
    was asked for."""

    def __init__(self, *arguments: Any, best: int, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.router_replay = ExpertGroupChoice(best)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count the tokens of each expert, where that is for something: megatron-core compiles it."""
        if self.config.moe_router_bias_update_rate:
            super()._apply_expert_bias(routing_map, padding_mask)
