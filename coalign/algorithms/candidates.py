"""What losses ask of the next-token distribution beyond the token that came, straight from hidden states.

Log-probs of a few tokens: a teacher's likeliest (distillation), + and - (process rewards); and how peaked it is. The
logits of a block of positions exist only while it is computed, forward and once more backward.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

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
) -> Tensor:
    """f32[M, K]: log-probs of ``candidates`` i64[M, K] after hidden [M, H]; logits as in `linear_logprobs`.

    Differentiable in hidden, weight and bias. Raises ValueError for a candidate outside of the vocabulary.
    """
    if candidates.numel() and int(candidates.max()) >= len(weight):
        raise ValueError(
            f"candidate token {int(candidates.max())} is outside of this model's vocabulary of {len(weight)}: "
            "teacher and student must share a tokenizer"
        )

    def block(hidden: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        logits = _logits(hidden, weight, bias, temperature, scale, softcap)
        return logits.gather(1, ids) - logits.logsumexp(1, keepdim=True)

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
) -> tuple[Tensor, Tensor]:
    """The ``k`` likeliest tokens after hidden [M, H], best first: i64[M, K], and their log-probs f32[M, K]. K is the
    smaller of k and the vocabulary."""
    k = min(k, len(weight))
    ids, logprobs = [], []
    for part in hidden.split(_rows(hidden, weight)):
        logits = _logits(part, weight, bias, temperature, scale, softcap)
        top = logits.topk(k, dim=1)
        ids.append(top.indices)
        logprobs.append(top.values - logits.logsumexp(1, keepdim=True))
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
) -> Tensor:
    """f32[M]: log Σ p² over the vocabulary after hidden [M, H], the log-prob that two draws agree."""
    parts = []
    for part in hidden.split(_rows(hidden, weight)):
        logits = _logits(part, weight, bias, temperature, scale, softcap)
        normaliser = logits.logsumexp(1)
        parts.append(logits.mul_(2).logsumexp(1) - 2 * normaliser)
    return torch.cat(parts)


def _rows(hidden: Tensor, weight: Tensor) -> int:
    return max(1, BLOCK.get(hidden.device.type, BLOCK["cuda"]) // len(weight))


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, scale: float, softcap: float | None
) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        logits = scale * torch.nn.functional.linear(hidden, weight.to(hidden.dtype), bias).float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits / temperature
