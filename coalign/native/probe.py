"""Two short proofs, made once for every model: that the engine computes what transformers computes, and that a sequence
gets the same bits in any batch.

An architecture may use attention in a way that its declarations do not tell (positions counted from another number, one
layer's attention called twice). Then the engine's tokens would be plausible and wrong, so it refuses to run. Where bits
depend on the batch, it says so: tokens are right, but another order or number of replicas may draw others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coalign.native.attention import NAME, ROWS, STRIDE, Decode, KVCache, Prefill, Segment
from coalign.native.model import Model

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # of the logits' own spread; a wrong token shows about 1
_STEPS = 4  # tokens decoded after the prefill


@torch.inference_mode()
def check(model: Model) -> None:
    """Compare the logits of one short sequence, prefilled and then decoded, with a plain forward.

    Raises ValueError where they differ at more than half of the positions (in bfloat16 a router may tip at a few).
    """
    tokens = _tokens(model)
    expected, met = _plain(model, tokens), _by_engine(model, tokens)
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    error = ((met - expected).norm(dim=-1) / spread).median().item()
    if error > _TOLERANCE[model.dtype]:  # not so for NaN: weights that are not numbers are reported when they generate
        kind = type(model.module).__name__
        raise ValueError(
            f"the native engine cannot run {kind}: its logits would differ from those of a plain forward by "
            f"{error:.1e} of their spread"
        )


def _plain(model: Model, tokens: Tensor) -> Tensor:
    model.module.set_attn_implementation("eager")
    logits = model.module(input_ids=tokens[None], use_cache=False).logits[0, ROWS - 1 :]
    model.module.set_attn_implementation(NAME)
    return logits.float()


@torch.inference_mode()
def is_invariant(model: Model) -> bool:
    """Whether the logits of that sequence have the same bits alone, among others, and where it goes on after a cut."""
    tokens = _tokens(model)
    alone = _by_engine(model, tokens)
    return torch.equal(alone, _by_engine(model, tokens, others=2 * ROWS + 1)) and torch.equal(
        alone[1:], _continued(model, tokens)
    )


def _tokens(model: Model) -> Tensor:
    return torch.arange(1, ROWS + _STEPS + 1, device=model.device) * 7919 % model.vocabulary


def _by_engine(model: Model, tokens: Tensor, others: int = 0) -> Tensor:
    """Logits after ROWS tokens of the prompt and at each step behind them, float32 [_STEPS + 1, V]. ``others``: longer
    sequences beside it, in slots before its own."""
    slots, length = -(-(others + 1) // ROWS) * ROWS, _room((3 if others else 1) * len(tokens))
    cache, positions = KVCache(slots, length, lambda size: None), torch.arange(length, device=model.device)
    fed, places, segments = [], [], []
    for slot in range(others):
        start, count = len(places), len(tokens) + slot
        fed += [(slot + i) % model.vocabulary for i in range(count)]
        places += range(count)
        segments.append(Segment(start, start + count, slice(slot, slot + 1)))
    segments.append(Segment(len(places), len(places) + ROWS, slice(others, others + 1)))
    fed += tokens[:ROWS].tolist()
    places += range(ROWS)
    last = torch.tensor([len(places) - 1], device=model.device)
    out = [model.forward(*_padded(model, fed, places), Prefill(cache, segments), last)]
    for step in range(ROWS, len(tokens)):
        fed, at = torch.zeros(2, slots, dtype=torch.int64, device=model.device)
        at[:others] = positions[step + len(tokens) : step + len(tokens) + 1]
        fed[others], at[others] = tokens[step], step
        columns = int(at.max()) + 1
        out.append(model.forward(fed, at, Decode(cache, at, columns), None)[others : others + 1])
    return torch.cat(out).float()


def _continued(model: Model, tokens: Tensor) -> Tensor:
    """The logits of the steps where all tokens are there at once, as of a sample that goes on. float32 [_STEPS, V]"""
    cache, count = KVCache(ROWS, _room(len(tokens)), lambda size: None), len(tokens)
    whole = Prefill(cache, [Segment(0, count, slice(0, 1), decoded=_STEPS)])
    rows = torch.arange(ROWS, count, device=model.device)
    return model.forward(*_padded(model, tokens.tolist(), list(range(count))), whole, rows).float()


def _room(tokens: int) -> int:
    """Columns of a cache for so many tokens, as Slots has them."""
    return -(-tokens // STRIDE) * STRIDE


def _padded(model: Model, tokens: list[int], positions: list[int]) -> tuple[Tensor, Tensor]:
    padding = [0] * (-len(tokens) % ROWS)
    return tuple(torch.tensor(values + padding, device=model.device) for values in (tokens, positions))
