"""Attention over one packed row, behind transformers' attention interface.

It serves every decoder whose layers call the interface, with sliding windows, soft-capped scores and grouped heads.
No [P, P] mask is built: on CUDA one call computes the row (flash or flex attention), elsewhere one call each block of
coalign.backends.packing. Unknown settings are refused, never ignored.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from textwrap import shorten
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coalign.backends.hf.row_sharding import HeadExchange
from coalign.backends.packing import Block, Layout, RowPlan, Spans
from coalign.devices import get_compute_capability

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

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


@contextmanager
def refuse_failure(refusal: Callable[[str], Exception]) -> Iterator[None]:
    """Raise ``refusal(why)`` for what a model stumbles over in this context; not for a lack of memory."""
    try:
        yield
    except (NotImplementedError, torch.OutOfMemoryError):
        raise
    except Exception as problem:
        raise refusal(shorten(f"{type(problem).__name__}: {problem}", 200)) from problem


def _packed_attention(
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
    **options: Any,
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
    unknown = sorted(k for k, v in options.items() if v is not None and v is not False and k not in HARMLESS)
    if unknown or attention_mask is not None or not getattr(module, "is_causal", True):
        what = unknown or (["attention_mask"] if attention_mask is not None else ["is_causal=False"])
        raise UnsupportedAttention(f"packed attention does not know {what} of {type(module).__name__}")
    if heads is not None:
        query, key, value = (heads.split_heads(x) for x in (query, key, value))
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    settings: dict[str, Any] = {"scaling": scaling, "dropout": dropout, "window": sliding_window, "softcap": softcap}
    out = attend(query, key, value, plan=layout.plan, **settings)[None]
    return (out if heads is None else heads.join_heads(out)), None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    plan: RowPlan,
    scaling: float | None = None,
    dropout: float = 0.0,
    window: int | None = None,
    softcap: float | None = None,
    bias: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """query [P, heads, D], key [P, kv_heads, D] and value [P, kv_heads, E] -> [P, heads, E], in the dtype of value.
    ``scaling`` of the scores; None: 1 / sqrt(D). ``window``: how many tokens a token sees, itself included. ``bias``
    maps positions i64[K] of keys to what is added to their scores, f32[heads, K] (not with ``softcap``)."""
    kernel = plan.kernel
    if kernel == "auto":
        plain = softcap is None and key.shape[2] == value.shape[2] and not plan.two_way
        kernel = choose_kernel(value.dtype, value.device, plain=plain)
    if bias is not None or dropout:
        kernel = "blocks"  # the only one that has them
    scale: float = query.shape[2] ** -0.5 if scaling is None else scaling
    with torch.autocast(value.device.type, enabled=False):
        if kernel == "varlen":
            if plan.two_way or softcap is not None:
                why = "is causal, and tokens of an image see each other" if plan.two_way else "caps no scores"
                raise UnsupportedAttention(f"the attention kernel `varlen` {why}; use `flex`")
            return _attend_spans(query.to(value.dtype), key.to(value.dtype), value, plan.spans, scale, window)
        if kernel == "flex":
            return _attend_flex(query.to(value.dtype), key.to(value.dtype), value, plan, scale, window, softcap)
        return _attend_blocks(query, key, value, plan, scaling, dropout, window, softcap, bias)


# ---- how the scores are computed

KERNELS = ("blocks", "flex", "varlen")  # for a model's key `attention`
FLASH_DTYPES = (torch.bfloat16, torch.float16)


def choose_kernel(dtype: torch.dtype, device: torch.device, *, plain: bool = True) -> str:
    """Return the kernel for values of ``dtype`` on ``device``; ``plain``: scores are not capped, heads of one size.

    `varlen`, flash attention over sequences of different lengths, needs 16-bit floats and compute capability 8.0.
    `flex` computes anything else on CUDA. On other devices `blocks` calls scaled_dot_product_attention for each block.
    """
    if device.type != "cuda":
        return "blocks"
    flash = dtype in FLASH_DTYPES and get_compute_capability(device) >= (8, 0)
    return "varlen" if plain and flash and has_varlen() else "flex"


def check_kernel(kernel: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError for a kernel that does not compute values of ``dtype`` on this type of device."""
    if kernel in ("flex", "varlen") and device.type != "cuda":
        raise ValueError(f"is {kernel}, which computes on CUDA only; on {device.type} use `blocks`")
    if kernel == "varlen" and dtype not in FLASH_DTYPES:
        raise ValueError(f"is varlen, which computes in bfloat16 or float16; this model takes {dtype}: use `flex`")
    if kernel == "varlen" and not has_varlen():
        raise ValueError(f"is varlen, which needs torch 2.12 (windows, grouped heads); this is {torch.__version__}")


@cache
def has_varlen(*arguments: str) -> bool:
    """Whether torch's varlen_attn is there, with windows, grouped heads (torch 2.12) and these ``arguments``."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"window_size", "enable_gqa", *arguments} <= set(inspect.signature(varlen_attn).parameters)


def attend_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scale: float | None,
    window: int | None,
    **options: Any,
) -> Tensor:
    """One call of flash attention: query [Q, heads, D], key and value [K, kv_heads, D] -> [Q, heads, D]. ``spans``:
    where the queries and the keys of each sequence begin, i32[N + 1] each; ``longest``: the most of both. A sequence's
    last query is aligned with its last key. ``options`` are further arguments of torch's varlen_attn."""
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(
        query, key, value, *spans, *longest, scale=scale, window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1], **options,
    )  # fmt: skip
    return cast(Tensor, out)


def _attend_spans(query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float, window: int | None) -> Tensor:
    """One call of flash attention. The keys of a shared prompt are copied for each span that continues it: a gather of
    a few MiB a layer."""
    if spans.source is not None:
        key, value = (x.index_select(0, spans.source) for x in (key, value))
    return attend_flash(query, key, value, (spans.queries, spans.keys), spans.longest, scale, window)


def _attend_flex(
    query: Tensor, key: Tensor, value: Tensor, plan: RowPlan, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """One call of flex attention, with one mask of blocks for all layers with the same window."""
    from torch.nn.attention.flex_attention import flex_attention

    function = _compile_flex() if query.device.type == "cuda" else flex_attention
    mask = plan.keep(("flex", window), lambda: _flex_mask(plan, window))
    capped = None if softcap is None else lambda score, *_: softcap * torch.tanh(score / softcap)
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    out = function(q, k, v, capped, mask, scale, query.shape[1] != key.shape[1])
    return out[0].transpose(0, 1)


@cache
def _compile_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)  # rows have any length


def _flex_mask(plan: RowPlan, window: int | None) -> BlockMask:
    """A token sees the tokens of its sequence up to itself, within ``window``."""
    from torch.nn.attention.flex_attention import create_block_mask

    reach, positions = plan.reach, plan.positions
    groups = plan.two_way_groups if plan.two_way else None

    def sees(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = (k <= q) & (q < reach[k])
        if groups is not None:
            seen = seen | ((groups[q] == groups[k]) & (groups[q] >= 0))
        return seen if window is None else seen & (positions[q] - positions[k] < window)

    on_cuda = plan.device.type == "cuda"
    return create_block_mask(sees, None, None, len(reach), len(reach), device=plan.device, _compile=on_cuda)


def _attend_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: RowPlan,
    scaling: float | None,
    dropout: float,
    window: int | None,
    softcap: float | None,
    bias: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """One call of scaled_dot_product_attention for each block."""
    # Rotary embeddings may leave query and key in a wider dtype than value. On a CPU, the backward of torch's bf16
    # kernel takes twice the time of the float32 one.
    dtype = value.dtype
    computed = torch.promote_types(dtype, torch.float32) if value.device.type == "cpu" else dtype
    query, key, value = (x.to(computed) for x in (query, key, value))
    function = partial(_apply_softcap, softcap=softcap) if softcap else F.scaled_dot_product_attention
    function = partial(function, scale=scaling, dropout_p=dropout, enable_gqa=query.shape[1] != key.shape[1])
    # Split once: the backward of one split is one concatenation, that of many slices as many zero-filled copies.
    queries, keys, values = (x.split(plan.sizes) for x in (query, key, value))
    numbers = {block.start: i for i, block in enumerate(plan.blocks)}
    out = []
    for i, block in enumerate(plan.blocks):
        into, back = plan.stacking[i]
        prefix = [numbers[start] for start, _ in block.prefix]
        k, v = (_stack(x[i], block, into, [x[n] for n in prefix]) for x in (keys, values))
        mask = plan.mask(i, window)
        if bias is not None:
            mask = _add_bias(block, mask, plan.device, bias, computed)
        q, k, v = (x.transpose(1, 2) for x in (_stack(queries[i], block, into), k, v))
        rows = function(q, k, v, attn_mask=mask, is_causal=mask is None).transpose(1, 2).flatten(0, 1)
        out.append(rows if back is None else rows.index_select(0, back))
    return torch.cat(out).to(dtype)


def _stack(tokens: Tensor, block: Block, into: Tensor | None, prefix: Sequence[Tensor] = ()) -> Tensor:
    """[sum(lengths), H, D] -> [n, prefix + longest, H, D]; shorter spans are padded with their last token."""
    rows = (tokens if into is None else tokens.index_select(0, into)).unflatten(0, (len(block.lengths), -1))
    return torch.cat([*(x.expand(len(rows), -1, -1, -1) for x in prefix), rows], 1) if prefix else rows


def _add_bias(
    block: Block, seen: Tensor | None, device: torch.device, bias: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> Tensor:
    """[heads, longest, prefix + longest]: what is added to scores, -inf where a query may not look (``seen``; None: at
    later keys). The bias of the query's own position is subtracted: softmax does not see the difference, but bf16 would
    otherwise round the nearest keys of a late query all to one number."""
    prefix, longest = block.prefix_length, max(block.lengths)
    if seen is None:
        seen = torch.ones(longest, longest, dtype=torch.bool, device=device).tril()
    biases = bias(torch.arange(prefix + longest, device=device))
    return (biases[:, None] - biases[:, prefix:, None]).masked_fill(~seen, -torch.inf).to(dtype)


def _apply_softcap(
    query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None, is_causal: bool, enable_gqa: bool,
    scale: float | None, dropout_p: float, softcap: float,
) -> Tensor:  # fmt: skip
    """scaled_dot_product_attention on softcap * tanh(scores / softcap) (Gemma 2), which no kernel of torch has."""
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    factor: float = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.tanh(query @ key.transpose(2, 3) * (factor / softcap)) * softcap
    if attn_mask is None:  # is_causal
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    weights = scores.masked_fill(~attn_mask, -torch.inf).softmax(-1, dtype=torch.float32).to(value.dtype)
    return F.dropout(weights, dropout_p) @ value


@cache
def register_attention() -> str:
    """Make packed attention known to transformers, and return its name there."""
    from transformers import AttentionInterface  # slow

    # Not compiled, since blocks are Python objects: every row would be compiled anew.
    AttentionInterface.register(NAME, torch.compiler.disable(_packed_attention))
    return NAME
