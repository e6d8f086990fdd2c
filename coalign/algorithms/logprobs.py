"""Log-probs and entropies of chosen tokens straight from hidden states, without the [M, V] matrix of logits.

Distillation reads the log-probs of a teacher's likeliest tokens, process rewards those of + and -
(`candidate_logprobs`, `top_logprobs`). There the logits of a block of positions exist only while it is computed,
forward and once more backward. The vocabulary may be sharded over ranks: each computes the logits of its own tokens,
and the results are combined. Every rank then has the same result and the same gradient of it.

`linear_logprobs` processes the vocabulary in tiles. Forward keeps a running log-sum-exp per token. Backward recomputes
each tile's logits, since the incoming gradient per token is not known before, and turns them in place into the
gradient. A tile's rows of the weight's gradient are complete after one matrix product, so nothing accumulates in low
precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from coalign.cpu import operations


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """The tokens of one rank of ``group``: from ``first`` on, one for each row of its weight (at least one).

    ``size`` is the number of tokens on all ranks.
    """

    group: dist.ProcessGroup
    first: int
    size: int

    def max(self, x: Tensor) -> Tensor:
        """The element-wise maximum over the ranks."""
        x = x.clone()
        dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    def sum(self, x: Tensor) -> Tensor:
        """The element-wise sum over the ranks. Differentiable: each rank takes the gradient as it is."""
        return _Sum.apply(x, self.group)

    def logsumexp(self, x: Tensor) -> Tensor:
        """The log-sum-exp [M] over the ranks' log-sum-exps. Differentiable, like ``sum``."""
        top = self.max(x.detach())
        return self.sum((x - top).exp()).log() + top

    def gather_all(self, x: Tensor) -> Tensor:
        """Gather [M, k] from each of n ranks into [M, n · k]."""
        gathered = [torch.empty_like(x) for _ in range(self.group.size())]
        dist.all_gather(gathered, x.contiguous(), group=self.group)
        return torch.cat(gathered, 1)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


BLOCK = {"cpu": 2**22, "cuda": 2**26}  # logits held at once


def candidate_logprobs(
    hidden: Tensor,
    weight: Tensor,
    candidates: Tensor,
    *,
    bias: Tensor | None = None,
    shard: VocabularyShard | None = None,
    **transform: Any,
) -> Tensor:
    """f32[M, K]: log-probs of ``candidates`` i64[M, K] after hidden [M, H].

    The other arguments here and below, and ``transform`` (temperature, scale, softcap), are those of `linear_logprobs`.
    Differentiable in hidden, weight and bias. Raises ValueError for a candidate outside of the vocabulary.
    """
    size = len(weight) if shard is None else shard.size
    if candidates.numel() and int(candidates.max()) >= size:
        raise ValueError(
            f"candidate token {int(candidates.max())} is outside of this model's vocabulary of {size}: "
            "teacher and student must share a tokenizer"
        )

    def block(hidden: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        logits = _logits(hidden, weight, bias, **transform)
        if shard is None:
            return logits.gather(1, ids) - logits.logsumexp(1, keepdim=True)
        local_ids = ids - shard.first
        here = (local_ids >= 0) & (local_ids < len(weight))
        chosen = shard.sum(logits.gather(1, local_ids.clamp(0, len(weight) - 1)) * here)
        return chosen - shard.logsumexp(logits.logsumexp(1))[:, None]

    size = _count_block_rows(hidden, weight)
    blocks = zip(hidden.split(size), candidates.split(size), strict=True)
    return torch.cat([checkpoint(block, h, ids, weight, bias, use_reentrant=False) for h, ids in blocks])


@torch.no_grad()
def top_logprobs(
    hidden: Tensor, weight: Tensor, k: int, *, shard: VocabularyShard | None = None, **transform: Any
) -> tuple[Tensor, Tensor]:
    """The ``k`` likeliest tokens after hidden [M, H], best first: i64[M, K], and their log-probs f32[M, K].

    K is the smaller of k and the vocabulary. ``transform``: also the bias.
    """
    ids, logprobs = [], []
    for block in hidden.split(_count_block_rows(hidden, weight)):
        logits = _logits(block, weight, **transform)
        normaliser = logits.logsumexp(1)
        values, indices = logits.topk(min(k, len(weight)), dim=1)
        if shard is not None:
            more = min(k, shard.size) - values.shape[1]  # all ranks gather equally many
            values = shard.gather_all(F.pad(values, (0, more), value=-torch.inf))
            indices = shard.gather_all(F.pad(indices + shard.first, (0, more)))
            normaliser = shard.logsumexp(normaliser)
            values, best = values.topk(min(k, shard.size), dim=1)
            indices = indices.gather(1, best)
        ids.append(indices)
        logprobs.append(values - normaliser[:, None])
    return torch.cat(ids), torch.cat(logprobs)


@torch.no_grad()
def log_collision(hidden: Tensor, weight: Tensor, *, shard: VocabularyShard | None = None, **transform: Any) -> Tensor:
    """f32[M]: log Σ p² over the vocabulary after hidden [M, H], the log-prob that two draws agree."""
    results = []
    for block in hidden.split(_count_block_rows(hidden, weight)):
        logits = _logits(block, weight, **transform)
        normaliser = logits.logsumexp(1)
        squares = logits.mul_(2).logsumexp(1)
        if shard is not None:
            normaliser, squares = shard.logsumexp(normaliser), shard.logsumexp(squares)
        results.append(squares - 2 * normaliser)
    return torch.cat(results)


def _count_block_rows(hidden: Tensor, weight: Tensor) -> int:
    return max(1, BLOCK.get(hidden.device.type, BLOCK["cuda"]) // len(weight))


def _logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        logits = scale * F.linear(hidden, weight.to(hidden.dtype), bias).float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits / temperature


# Logits in memory at once: a CPU's caches hold about so many (measured), and a GPU is busy with them (not measured).
TILE = {"cpu": 2**21, "cuda": 2**26}
ROWS = 64  # tiles are multiples of this many weight rows: odd widths slow a matrix product by 10 % and more


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    shard: VocabularyShard | None = None,
    rows: int | None = None,
    tile: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of ``targets`` i64[M] and, if requested, the entropy of the whole distribution, in nats: f32[M] each.

    Logits are z / temperature with z = scale · (hidden [M, H] weightᵀ [H, V] + bias [V]), or with softcap · tanh(z /
    softcap) in place of z (Gemma's final_logit_softcapping). Products run in the dtype of ``hidden``, whatever autocast
    says, everything else in float32 (float64 for float64). Differentiable, once, in hidden, weight and bias through
    both results. ``tile`` is the number of logits in memory at a time. A target outside of the vocabulary gives nan.

    ``shard``: weight and bias are a rank's shard of the vocabulary. The gradient of hidden is then this shard's addend.
    ``rows``: the first rows of weight and bias, which alone are the vocabulary; None: all.

    Raises ValueError for a temperature that is not above 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}: log-probs need one above 0")
    tile = tile or TILE.get(hidden.device.type, TILE["cuda"])
    inner, outer = (scale / temperature, None) if softcap is None else (scale / softcap, softcap / temperature)
    head = _Head(inner, outer, rows=max(1, round(tile / max(1, len(hidden)) / ROWS)) * ROWS, vocabulary=rows)
    with torch.autocast(hidden.device.type, enabled=False):
        logprobs, entropies = _LinearLogprobs.apply(hidden, weight, bias, targets, head, entropy, shard)
    return logprobs, entropies


@dataclass(frozen=True, slots=True)
class _Head:
    """Logits as a function of hidden states: ``inner`` · product, or ``outer`` · tanh(``inner`` · product)."""

    inner: float
    outer: float | None
    rows: int  # in a tile
    vocabulary: int | None  # rows of the weight that have logits

    def products(self, hidden: Tensor, weight: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(first row of the weight, product [M, rows]) in one buffer, which the next tile overwrites."""
        count, rows = len(hidden), min(self.rows, len(weight))
        memory = hidden.new_empty(count * rows)
        for start in range(0, len(weight), rows):
            block = weight[start : start + rows]
            yield start, torch.mm(hidden, block.t(), out=memory[: count * len(block)].view(count, len(block)))

    def tiles(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator[tuple[int, Tensor]]:
        """(first row of the weight, logits [M, rows] in float32 or more), overwritten like the products."""
        exact: Tensor | None = None
        for start, logits in self.products(hidden, weight):
            if hidden.dtype != _exact(hidden):
                exact = logits.new_empty(logits.numel(), dtype=_exact(hidden)) if exact is None else exact
                logits = exact[: logits.numel()].view_as(logits).copy_(logits)
            if bias is not None:
                logits.add_(bias[start : start + logits.shape[1]])
            if self.inner != 1.0:
                logits.mul_(self.inner)
            if self.outer is not None:
                logits.tanh_().mul_(self.outer)
            yield start, logits

    def slope(self, logits: Tensor) -> Tensor | None:
        """d logits / d (inner · product), where it is not 1."""
        return None if self.outer is None else logits.square().div_(-self.outer).add_(self.outer)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: _Head,
        entropy: bool,
        shard: VocabularyShard | None,
    ) -> tuple[Tensor, Tensor | None]:
        targets = targets - shard.first if shard else targets.contiguous()
        sums = _sum_tiles(head, hidden, weight.to(hidden.dtype)[: head.vocabulary], bias, targets, entropy)
        logprobs, normaliser, entropies = _combine(*sums, shard)
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, entropies)
        ctx.head = head
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normaliser, entropies = ctx.saved_tensors
        head, needed = ctx.head, ctx.needs_input_grad
        cast = weight.to(hidden.dtype)[: head.vocabulary]
        # Without entropy a row of the gradient is a row of (softmax - one-hot) times a number. Multiplying the narrow
        # factor of the products by that number saves a pass over the logits.
        factor = -head.inner * (grad if entropies is None else torch.ones_like(grad))
        scaled = (hidden * factor[:, None]).to(hidden.dtype)
        grad_hidden = torch.zeros_like(hidden, dtype=factor.dtype) if needed[0] else None
        grad_weight = torch.empty_like(weight) if needed[1] else None
        grad_bias = torch.empty_like(bias) if needed[2] else None
        for outside in (grad_weight, grad_bias):
            if outside is not None:
                outside[len(cast) :] = 0
        by_entropy: tuple[Tensor, Tensor] | None = None
        if entropies is not None:
            assert grad_entropy is not None  # autograd passes zeros for an output that nobody used
            by_entropy = grad_entropy.contiguous(), entropies
        for start, error in _errors(head, hidden, cast, bias, targets, normaliser, grad.contiguous(), by_entropy):
            rows = slice(start, start + error.shape[1])
            if grad_bias is not None:
                grad_bias[rows] = error.t() @ factor
            error = error.to(hidden.dtype)
            if grad_weight is not None:
                grad_weight[rows] = error.t() @ scaled
            if grad_hidden is not None and grad_hidden.dtype == error.dtype:
                grad_hidden.addmm_(error, cast[rows])
            elif grad_hidden is not None:
                grad_hidden.add_(error @ cast[rows])
        if grad_hidden is not None:
            grad_hidden = grad_hidden.mul_(factor[:, None]).to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _sum_tiles(
    head: _Head, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """One pass over the vocabulary: per token the highest logit, Σ exp(z - highest), with ``entropy`` Σ exp(z -
    highest) · (z - highest), and the target's logit (nan if it is not there). All [M]."""
    top = torch.full(targets.shape, torch.finfo(_exact(hidden)).min, dtype=_exact(hidden), device=targets.device)
    total, moment, chosen = torch.zeros_like(top), torch.zeros_like(top), torch.full_like(top, float("nan"))
    if bias is None and operations.has_kernel(hidden):
        sums = top, total, moment if entropy else None, chosen
        for start, products in head.products(hidden, weight):
            operations.add_tile(products, head.inner, head.outer, targets, start, sums)
        return sums
    for start, logits in head.tiles(hidden, weight, bias):
        columns, inside = _locate(targets, start, logits)
        chosen = torch.where(inside, logits.gather(1, columns)[:, 0], chosen)
        higher = torch.maximum(top, logits.amax(1))
        shrink = (top - higher).exp_()
        logits.sub_(higher[:, None])
        if entropy:  # the moment moves with top
            weights = logits.exp()
            moment = shrink * (moment + total * (top - higher)) + weights.mul(logits).sum(1)
            added = weights.sum(1)
        else:
            added = logits.exp_().sum(1)
        total = shrink * total + added
        top = higher
    return top, total, moment if entropy else None, chosen


def _combine(
    top: Tensor, total: Tensor, moment: Tensor | None, chosen: Tensor, shard: VocabularyShard | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-probs, log-sum-exps and entropies over all ranks from the sums of each. All [M]."""
    if shard is not None:
        local_top, top = top, shard.max(top)
        shrink = (local_top - top).exp_()
        has_target = ~chosen.isnan()
        moved = total if moment is None else shrink * (moment + total * (local_top - top))
        sums = shrink * total, moved, chosen.nan_to_num_(0.0), has_target.to(total.dtype)
        total, moved, chosen, target_count = shard.sum(torch.stack(sums))
        moment = None if moment is None else moved
        chosen = chosen.masked_fill(target_count == 0, float("nan"))
    log_total = total.log()
    sums = top + log_total
    return chosen - sums, sums, None if moment is None else log_total - moment / total


def _errors(
    head: _Head,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    normaliser: Tensor,
    grad: Tensor,
    by_entropy: tuple[Tensor, Tensor] | None,
) -> Iterator[tuple[int, Tensor]]:
    """(first row of the weight, minus the gradient with respect to inner · product), tile by tile; without entropy
    divided by ``grad``. ``by_entropy``: the gradient of the entropy, and the entropy."""
    if bias is None and operations.has_kernel(hidden):
        for start, products in head.products(hidden, weight):
            factors = head.inner, head.outer
            operations.turn_into_errors(products, *factors, targets, start, normaliser, grad, by_entropy)
            yield start, products
        return
    for start, logits in head.tiles(hidden, weight, bias):
        slope = head.slope(logits)
        columns, inside = _locate(targets, start, logits)
        logits.sub_(normaliser[:, None])
        if by_entropy is None:
            error, peak = logits.exp_(), inside.to(logits.dtype)
        else:
            grad_entropy, entropies = by_entropy
            probabilities = logits.exp()
            error = logits.add_(entropies[:, None]).mul_(grad_entropy[:, None]).add_(grad[:, None]).mul_(probabilities)
            peak = inside * grad
        error.scatter_add_(1, columns, -peak[:, None])
        yield start, error if slope is None else error.mul_(slope)


def _locate(targets: Tensor, start: int, logits: Tensor) -> tuple[Tensor, Tensor]:
    """(column of each target in this tile [M, 1], whether it is there [M]), without waiting for a device."""
    local = targets - start
    return local.clamp(0, logits.shape[1] - 1)[:, None], (local >= 0) & (local < logits.shape[1])


def _exact(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
