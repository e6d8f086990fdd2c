"""Draws the next token from logits: pure functions in which no row depends on another.

Randomness is counter-based: a token's uniform number is a hash of (seed, group, index, position). It does not depend on
the batch, the replica or the order of arrival.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from coalign.config.schema import SamplingConfig
from coalign.cpu import operations

_CHUNK = 128
_CANDIDATES = 1024  # top-p first looks for the nucleus among this many tokens, then sorts the whole vocabulary
_MASK = (1 << 64) - 1
_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64, Steele et al. 2014


def stream_key(seed: int, group: int, index: int, restarts: int = 0) -> int:
    """Return the key of one sample's random stream, a signed 64-bit number; another one after each of ``restarts``."""
    key = 0
    for number in (seed, group, index, restarts)[: 4 if restarts else 3]:
        key = _mix_int((key + _GOLDEN + number) & _MASK)
    return key - (1 << 64) if key >> 63 else key


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Hash (stream key, token position) to numbers in [0, 1) with 53 random bits. i64[B], i64[B] -> f64[B]."""
    state = keys + positions * _to_signed(_GOLDEN)
    state = (state ^ _shift(state, 30)) * _to_signed(_MIX1)
    state = (state ^ _shift(state, 27)) * _to_signed(_MIX2)
    return _shift(state ^ _shift(state, 31), 11).to(torch.float64) * 2.0**-53


def sample(
    logits: Tensor, uniform: Tensor, sampling: SamplingConfig, seen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draw one token for each row.

    logits [B, V]; uniform f64[B]; seen bool[B, V]: the tokens of prompt and response, which the penalty applies to.
    Returns tokens i64[B] and their log-probs f32[B] under the penalised, temperature-scaled distribution before top-k,
    top-p and min-p. Temperature 0 takes the most likely token and reports its log-prob at temperature 1.
    """
    if seen is not None:
        logits = _penalise(logits.float(), seen, sampling.repetition_penalty)
    if sampling.temperature != 0 and not _truncates(sampling) and operations.has_kernel(logits):
        return operations.draw_tokens(logits, uniform, sampling.temperature)
    logits = logits.float()
    if sampling.temperature == 0:
        tokens = logits.max(-1).indices
        return tokens, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    probs = logits.softmax(-1)
    tokens = draw(truncate(probs, sampling), uniform)
    return tokens, _log(probs.gather(1, tokens[:, None])[:, 0])


def _truncates(sampling: SamplingConfig) -> bool:
    """Whether some tokens cannot be drawn: by top-k, top-p or min-p."""
    return bool(sampling.top_k or sampling.top_p < 1 or sampling.min_p)


def may_wait(sampling: SamplingConfig) -> bool:
    """Whether ``sample`` may wait for the device: for top-p, to see whether the likeliest tokens hold the nucleus."""
    return sampling.temperature != 0 and sampling.top_p < 1


def read_choices(
    tokens: Tensor, logprobs: Tensor, groups: Sequence[int], version: int
) -> tuple[list[int], list[float]]:
    """Read the tokens i64[B] and log-probs f32[B] of a step from the device, and wait for it once. Raises
    FloatingPointError, with the ``groups`` of the rows, if any of the log-probs is not finite."""
    both = torch.stack([tokens.double(), logprobs.double()])  # which holds every token and every float32
    numbers, values = both.tolist()
    if bad := sorted({groups[row] for row, value in enumerate(values) if not math.isfinite(value)}):
        raise FloatingPointError(f"logits are not finite (weights version {version}, groups {bad})")
    return [int(number) for number in numbers], values


def _penalise(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide positive logits of seen tokens by ``penalty``, multiply negative ones (Keskar et al. 2019, CTRL)."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def truncate(probs: Tensor, sampling: SamplingConfig) -> Tensor:
    """Set probabilities [B, V] outside top-k, then top-p, then min-p to zero, without renormalising. Every rule keeps
    the tokens whose probability reaches a threshold: equally likely tokens stay or go together."""
    if not _truncates(sampling):
        return probs
    vocabulary = probs.shape[-1]
    threshold = torch.zeros(len(probs), 1, dtype=probs.dtype, device=probs.device)
    top_k = min(sampling.top_k, vocabulary)
    if top_k:
        threshold = probs.topk(top_k).values[:, -1:]
    if sampling.top_p < 1:
        threshold = torch.maximum(threshold, _nucleus_threshold(probs, sampling.top_p, top_k or vocabulary))
    if sampling.min_p:
        threshold = torch.maximum(threshold, probs.amax(-1, keepdim=True) * sampling.min_p)
    return torch.where(probs >= threshold, probs, 0.0)


def _nucleus_threshold(probs: Tensor, top_p: float, top_k: int) -> Tensor:
    """Find the smallest probability in the top-p nucleus of each row's ``top_k`` most likely tokens. [B, 1]"""
    for count in sorted({min(_CANDIDATES, top_k), top_k}):
        ranked = probs.topk(count).values
        mass = ranked.cumsum(-1, dtype=torch.float64)
        total = mass[:, -1:] if count == top_k else torch.ones_like(mass[:, -1:])
        last = (mass < top_p * total).sum(-1, keepdim=True)
        if count == top_k or bool((last < count).all()):
            return ranked.gather(1, last.clamp(max=count - 1))
    raise AssertionError("unreachable: the last count is top_k")


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Sample from unnormalised ``weights`` [B, V] by inverse CDF at ``uniform`` f64[B]. Returns i64[B]. Sums of chunks
    choose a chunk, then a running sum inside it chooses the token: only the sums read all of V."""
    if excess := weights.shape[-1] % _CHUNK:
        weights = F.pad(weights, (0, _CHUNK - excess))
    chunks = weights.view(len(weights), -1, _CHUNK)
    bounds = chunks.sum(-1).double().cumsum(-1)
    chunk, rest = _locate(bounds, uniform * bounds[:, -1])
    inside = chunks.gather(1, chunk[:, None, None].expand(-1, 1, _CHUNK))[:, 0].double().cumsum(-1)
    token, _ = _locate(inside, rest)
    return chunk * _CHUNK + token


def _locate(bounds: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Find each row's first running sum above ``target``, and the rest of the target inside that entry. Rounding may
    put the target at or past the end; the last entry that added anything is then taken."""
    last = (bounds < bounds[:, -1:]).sum(-1)
    index = torch.minimum((bounds <= target[:, None]).sum(-1), last)
    preceding = bounds.gather(1, (index - 1).clamp(min=0)[:, None])[:, 0] * (index > 0)
    return index, target - preceding


def _log(values: Tensor) -> Tensor:
    """Take logarithms f32[B] whose bits do not depend on B: padded to whole vectors, so no scalar tail is left."""
    return F.pad(values, (0, -len(values) % 64), value=1.0).log()[: len(values)]


def _mix_int(state: int) -> int:
    state = ((state ^ (state >> 30)) * _MIX1) & _MASK
    state = ((state ^ (state >> 27)) * _MIX2) & _MASK
    return state ^ (state >> 31)


def _to_signed(constant: int) -> int:
    return constant - (1 << 64)


def _shift(state: Tensor, bits: int) -> Tensor:
    """Shift right without the sign, which torch's own shift keeps."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)
