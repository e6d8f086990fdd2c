"""A short proof that the engine computes what transformers computes, made once for every model.

An architecture may use attention in a way that its declarations do not tell (positions counted from another number, one
layer's attention called twice). Then the engine's tokens would be plausible and wrong, so it refuses to run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coalign.native.attention import NAME, Decode, KVCache, Prefill, Segment
from coalign.native.linear import ROWS
from coalign.native.model import Model

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # of the logits' own spread; a wrong token shows about 1
_STEPS = 4  # tokens decoded after the prefill


@torch.inference_mode()
def check(model: Model) -> None:
    """Compare the logits of one short sequence, prefilled and then decoded, with a plain forward.

    Raises ValueError where they differ at more than half of the positions (in bfloat16 a router may tip at a few).
    """
    tokens = torch.arange(1, ROWS + _STEPS + 1, device=model.device) * 7919 % model.vocabulary
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


def _by_engine(model: Model, tokens: Tensor) -> Tensor:
    cache, positions = KVCache(ROWS, len(tokens), lambda size: None), torch.arange(len(tokens), device=model.device)
    last = positions[ROWS - 1 : ROWS]
    out = [model.forward(tokens[:ROWS], positions[:ROWS], Prefill(cache, [Segment(0, ROWS, slice(0, 1))]), last)]
    for step in range(ROWS, len(tokens)):
        fed, at = torch.zeros(2, ROWS, dtype=torch.int64, device=model.device)
        fed[0], at[0] = tokens[step], step
        out.append(model.forward(fed, at, Decode(cache, at, step + 1), None)[:1])
    return torch.cat(out).float()
