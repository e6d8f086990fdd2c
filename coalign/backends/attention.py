"""Attention over one packed row, block by block, behind transformers' attention interface.

It serves every decoder whose layers call the interface, with sliding windows, soft-capped scores and grouped heads.
No [P, P] mask is built: each block of coalign.backends.layout is one call of scaled_dot_product_attention. Unknown
settings are refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from coalign.backends.hf.rows import HeadExchange
from coalign.backends.layout import Block, Layout, index_padding

NAME = "coalign_packed"

# Keyword arguments of decoders that change nothing here.
HARMLESS = {"position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states"}


class UnsupportedAttention(NotImplementedError):
    """A layer needs attention that this backend does not compute."""


@torch.no_grad()
def check_attention(model: nn.Module, compute: Callable[[], object]) -> None:
    """Let ``compute`` run ``model``; UnsupportedAttention for a layer that calls attention with unknown settings. On
    the meta device, without weights, the model runs up to the first operation that depends on values."""
    try:
        compute()
    except UnsupportedAttention:
        raise
    except RuntimeError:  # such as a router, which needs to know which experts it chose
        if not next(model.parameters()).is_meta:
            raise


@torch.compiler.disable  # blocks are Python objects: every row would be compiled anew
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout | None = None,
    heads: HeadExchange | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, P, D], key and value [1, kv_heads, P, D] -> [1, P, heads, D].

    ``heads`` exchanges heads among ranks that hold a part of the row each; ``layout`` has the blocks of the whole row.
    Raises UnsupportedAttention for a dense mask, for attention that is not causal, for further settings that would
    change the result (attention sinks, position biases), and for a layer that does not pass keyword arguments on.
    """
    if layout is None:
        raise UnsupportedAttention(
            f"{type(module).__name__} cannot compute packed sequences: its layer does not hand keyword arguments to it"
        )
    unknown = sorted(k for k, v in other.items() if v is not None and v is not False and k not in HARMLESS)
    if unknown or attention_mask is not None or not getattr(module, "is_causal", True):
        what = unknown or (["attention_mask"] if attention_mask is not None else ["is_causal=False"])
        raise UnsupportedAttention(f"packed attention does not know {what} of {type(module).__name__}")
    if heads is not None:
        query, key, value = (heads.split_heads(x) for x in (query, key, value))
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    settings: dict[str, Any] = {"scaling": scaling, "dropout": dropout, "window": sliding_window, "softcap": softcap}
    out = attend(query, key, value, blocks=layout.blocks, padding=layout.padding, **settings)[None]
    return (out if heads is None else heads.join_heads(out)), None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    blocks: tuple[Block, ...],
    padding: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    window: int | None = None,
    softcap: float | None = None,
    bias: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """query [P, heads, D], key [P, kv_heads, D] and value [P, kv_heads, E] -> [P, heads, E], in the dtype of value.
    ``padding``: `index_padding` of the blocks, on the device; None: it is computed. ``scaling`` of the scores; None:
    1 / sqrt(D). ``window``: how many tokens a token sees, itself included. ``bias`` maps positions i64[K] of keys to
    what is added to their scores, f32[heads, K] (not with ``softcap``)."""
    # Rotary embeddings may leave query and key in a wider dtype than value. On a CPU, the backward of torch's bf16
    # kernel takes twice the time of the float32 one.
    dtype = value.dtype
    kernel = torch.promote_types(dtype, torch.float32) if value.device.type == "cpu" else dtype
    query, key, value = (x.to(kernel) for x in (query, key, value))
    function = partial(_apply_softcap, softcap=softcap) if softcap else F.scaled_dot_product_attention
    function = partial(function, scale=scaling, dropout_p=dropout, enable_gqa=query.shape[1] != key.shape[1])
    mask = partial(_mask, window=window, device=query.device)
    if bias is not None:
        mask = partial(_add_bias, window=window, device=query.device, bias=bias, dtype=kernel)
    padding = index_padding(blocks).to(value.device) if padding is None else padding
    with torch.autocast(value.device.type, enabled=False):
        return _attend(function, query, key, value, blocks, padding, mask).to(dtype)


def _attend(
    attend: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: tuple[Block, ...],
    padding: Tensor,
    mask_of: Callable[[Block], Tensor | None],
) -> Tensor:
    # Split once: the backward of one split is one concatenation, that of many slices as many zero-filled copies.
    sizes = [sum(block.lengths) for block in blocks]
    queries, keys, values = (x.split(sizes) for x in (query, key, value))
    numbers = {block.start: i for i, block in enumerate(blocks)}
    indices = iter(padding.split(_padding_sizes(blocks)))
    out = []
    for i, block in enumerate(blocks):
        into, back = (next(indices), next(indices)) if block.is_ragged else (None, None)
        k, v = _stack(keys[i], block, into), _stack(values[i], block, into)
        if block.prefix:
            prefix = numbers[block.prefix[0]]
            k, v = (torch.cat([x[prefix].expand(len(y), -1, -1, -1), y], 1) for x, y in ((keys, k), (values, v)))
        mask = mask_of(block)
        q, k, v = (x.transpose(1, 2) for x in (_stack(queries[i], block, into), k, v))
        rows = attend(q, k, v, attn_mask=mask, is_causal=mask is None)
        out.append(_unstack(rows.transpose(1, 2), back))
    return torch.cat(out)


def _padding_sizes(blocks: tuple[Block, ...]) -> list[int]:
    """How many indices each of two parts has, of every block that needs some."""
    ragged = [block.lengths for block in blocks if block.is_ragged]
    return [size for lengths in ragged for size in (len(lengths) * max(lengths), sum(lengths))]


def _stack(own: Tensor, block: Block, index: Tensor | None) -> Tensor:
    """[sum(lengths), H, D] -> [n, longest, H, D]; shorter spans are padded with their last token, by ``index``."""
    rows = own if index is None else own.index_select(0, index)
    return rows.unflatten(0, (len(block.lengths), max(block.lengths)))


def _unstack(x: Tensor, index: Tensor | None) -> Tensor:
    """[n, longest, H, D] -> [sum(lengths), H, D]."""
    rows = x.flatten(0, 1)
    return rows if index is None else rows.index_select(0, index)


def _mask(block: Block, window: int | None, device: torch.device) -> Tensor | None:
    """bool[longest, prefix + longest], True where a query may look; None for plain causal attention."""
    before = block.prefix[1] - block.prefix[0] if block.prefix else 0
    longest = max(block.lengths)
    if not before and (window is None or window >= longest):
        return None
    query = torch.arange(before, before + longest, device=device)[:, None]
    key = torch.arange(before + longest, device=device)
    mask = key <= query
    return mask if window is None or window >= before + longest else mask & (key > query - window)


def _add_bias(
    block: Block, window: int | None, device: torch.device, bias: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> Tensor:
    """[heads, longest, prefix + longest]: what is added to scores, -inf where a query may not look. The bias of the
    query's own position is subtracted: softmax does not see the difference, but bf16 would otherwise round the nearest
    keys of a late query all to one number."""
    before = block.prefix[1] - block.prefix[0] if block.prefix else 0
    longest = max(block.lengths)
    seen = _mask(block, window, device)
    if seen is None:
        seen = torch.ones(longest, longest, dtype=torch.bool, device=device).tril()
    biases = bias(torch.arange(before + longest, device=device))
    return (biases[:, None] - biases[:, before:, None]).masked_fill(~seen, -torch.inf).to(dtype)


def _apply_softcap(
    query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None, is_causal: bool, enable_gqa: bool,
    scale: float | None, dropout_p: float, softcap: float,
) -> Tensor:  # fmt: skip
    """scaled_dot_product_attention on softcap * tanh(scores / softcap) (Gemma 2). No kernel of torch has it."""
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    factor: float = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.tanh(query @ key.transpose(2, 3) * (factor / softcap)) * softcap
    if attn_mask is None:  # is_causal
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    weights = scores.masked_fill(~attn_mask, -torch.inf).softmax(-1, dtype=torch.float32).to(value.dtype)
    return F.dropout(weights, dropout_p) @ value


AttentionInterface.register(NAME, packed_attention)
