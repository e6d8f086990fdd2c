"""What losses ask of the next-token distribution beyond the token that came, straight from hidden states.

Log-probs of a few tokens: a teacher's likeliest (distillation), + and - (process rewards); and how peaked it is. The
logits of a block of positions exist only while it is computed, forward and once more backward.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from coalign.algorithms.vocabulary import VocabularyShard

BLOCK = {"cpu": 2**22, "cuda": 2**26}  # logits held at once


def candidate_logprobs(
    hidden: Tensor,
    weight: Tensor,
    candidates: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    share: VocabularyShard | None = None,
) -> Tensor:
    """f32[M, K]: log-probs of ``candidates`` i64[M, K] after hidden [M, H]; logits as in `linear_logprobs`.

    Differentiable in hidden, weight and bias; ``share`` as there. Raises ValueError for a candidate outside of the
    vocabulary.
    """
    size = len(weight) if share is None else share.size
    if candidates.numel() and int(candidates.max()) >= size:
        raise ValueError(
            f"candidate token {int(candidates.max())} is outside of this model's vocabulary of {size}: "
            "teacher and student must share a tokenizer"
        )

    def block(hidden: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        logits = _logits(hidden, weight, bias, temperature, scale, softcap)
        if share is None:
            return logits.gather(1, ids) - logits.logsumexp(1, keepdim=True)
        own = ids - share.first
        here = (own >= 0) & (own < len(weight))
        chosen = share.sum(logits.gather(1, own.clamp(0, len(weight) - 1)) * here)
        return chosen - share.logsumexp(logits.logsumexp(1))[:, None]

    size = _rows(hidden, weight)
    parts = zip(hidden.split(size), candidates.split(size), strict=True)
    return torch.cat([checkpoint(block, h, ids, weight, bias, use_reentrant=False) for h, ids in parts])


@torch.no_grad()
def top_logprobs(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    share: VocabularyShard | None = None,
) -> tuple[Tensor, Tensor]:
    """The ``k`` likeliest tokens after hidden [M, H], best first: i64[M, K], and their log-probs f32[M, K]. K is the
    smaller of k and the vocabulary."""
    ids, logprobs = [], []
    for part in hidden.split(_rows(hidden, weight)):
        logits = _logits(part, weight, bias, temperature, scale, softcap)
        normaliser = logits.logsumexp(1)
        values, indices = logits.topk(min(k, len(weight)), dim=1)
        if share is not None:
            more = min(k, share.size) - values.shape[1]  # ranks change over equally many
            values, indices = F.pad(values, (0, more), value=-torch.inf), F.pad(indices + share.first, (0, more))
            values, indices, normaliser = share.all(values), share.all(indices), share.logsumexp(normaliser)
            values, best = values.topk(min(k, share.size), dim=1)
            indices = indices.gather(1, best)
        ids.append(indices)
        logprobs.append(values - normaliser[:, None])
    return torch.cat(ids), torch.cat(logprobs)


@torch.no_grad()
def log_collision(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    share: VocabularyShard | None = None,
) -> Tensor:
    """f32[M]: log Σ p² over the vocabulary after hidden [M, H], the log-prob that two draws agree."""
    parts = []
    for part in hidden.split(_rows(hidden, weight)):
        logits = _logits(part, weight, bias, temperature, scale, softcap)
        normaliser = logits.logsumexp(1)
        squares = logits.mul_(2).logsumexp(1)
        if share is not None:
            normaliser, squares = share.logsumexp(normaliser), share.logsumexp(squares)
        parts.append(squares - 2 * normaliser)
    return torch.cat(parts)


def _rows(hidden: Tensor, weight: Tensor) -> int:
    return max(1, BLOCK.get(hidden.device.type, BLOCK["cuda"]) // len(weight))


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, scale: float, softcap: float | None
) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        logits = scale * F.linear(hidden, weight.to(hidden.dtype), bias).float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits / temperature
