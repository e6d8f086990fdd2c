"""Watches megatron-core's routers, adds their losses to the gradient, and has them choose given experts.

The losses are those of coalign.algorithms.routing, over all tokens of an update. megatron-core's own are taken of each
micro-batch, and scaled for gradients that are divided by numbers of tokens later, which is not done here.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from coalign.algorithms.routing import count_choices
from coalign.backends.layout import Layout
from coalign.backends.routers import ExpertChoice, RouterCoefficients, RouterTotals


class _AddLoss(torch.autograd.Function):
    """Passes ``x`` on; in backward, a loss beside it has the gradient 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.ones_like(ctx.like)


class MegatronRouters:
    """The routers of a rank's chunks. ``layers``: for each layer of the whole model, whether it has experts.

    ``place`` says before each forward which tokens it has. ``counts`` f64[L, E] grow by the tokens of each expert; L
    counts the layers with experts of the whole model, of which this rank has some.
    """

    def __init__(self, models: Sequence[nn.Module], layers: Sequence[int], experts: int) -> None:
        self.totals = RouterTotals()
        self.shape = sum(layers), experts
        self.counts = torch.zeros(self.shape, dtype=torch.float64)
        self.factors: RouterCoefficients | None = None  # of the losses; None: no gradient
        self.everything = self.counts
        self.tokens: tuple[Tensor, Tensor | None] = torch.ones(0), None
        self.again: dict[int, deque[tuple[Tensor, Tensor | None]]] = defaultdict(deque)
        numbers = [0, *accumulate(layers)]
        for router in (module for model in models for module in model.modules() if isinstance(module, TopKRouter)):
            number = numbers[cast(int, router.layer_number) - 1]
            router.routing = partial(self._route, number, router.routing)  # pyright: ignore[reportAttributeAccessIssue]

    def place(self, layout: Layout, *, idle: bool) -> None:
        """Take the tokens of the next forward; with sequence parallelism the routers of a rank see some of them."""
        ranks, rank = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
        copies = cast(Tensor, layout.copies)
        weights = torch.zeros_like(copies) if idle else copies
        given = None if layout.experts is None else layout.experts.chunk(ranks)[rank]
        self.tokens = weights.chunk(ranks)[rank], given

    @contextmanager
    def learning(self, factors: RouterCoefficients) -> Iterator[None]:
        """Within this context forwards have backwards, and the gradient of the routers' losses is added."""
        self.factors = factors
        self.again.clear()
        try:
            yield
        finally:
            self.factors = None

    def add_up(self, values: Tensor) -> Tensor:
        """The sum over all ranks: no two of them have the same token in the same layer."""
        values = values.clone()
        dist.all_reduce(values)
        return values

    def _route(
        self, layer: int, routing: Callable[..., Any], logits: Tensor, padding_mask: Tensor | None = None
    ) -> Any:
        training, first = self.factors is not None, not torch.is_grad_enabled()
        weights, given = self.tokens
        if training and first:  # backward computes the layer again, in the order of the micro-batches
            self.again[layer].append(self.tokens)
        elif training and self.again[layer]:
            weights, given = self.again[layer].popleft()
        experts = self.shape[1]
        choice = ExpertChoice(experts, None if given is None else given[:, layer].long())
        with choice:
            probabilities, chosen = routing(logits, padding_mask)
        [found] = choice.found
        if not (training and first):
            self.counts[layer] += count_choices(found, weights.to(found.device), experts).cpu()
        if self.factors and not first:
            flat = logits.view(-1, experts)
            loss = self.totals.compute_loss(flat, weights, self.everything[layer], self.factors)
            probabilities = _AddLoss.apply(probabilities, loss)
        return probabilities, chosen
