"""The native engine's KV cache, and the attention function through which transformers models use it.

A model runs on packed rows: tokens [1, T] of many sequences with their own positions. The attention function receives
``kv`` (PrefillAttention or DecodeAttention) through the model's keyword arguments. That object stores keys and values
and knows which rows belong together, so the model needs no Cache object and builds no mask.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coalign.backends.attention import UnsupportedAttention, attend_flash, choose_kernel, has_varlen
from coalign.cpu import operations

NAME = "coalign_native"  # deliberately has no entry in transformers' mask interface: then models build no mask
ROWS = 8  # the engine computes multiples of this many rows: vector loops then never end inside a row
STRIDE = 16  # decode attends over a whole number of such column blocks
_ROWS_AT_ONCE = 64
SLOT_ARGUMENTS = ("seqused_k", "num_splits")  # varlen_attn needs them to read only the first keys of a slot
EXPERTS = -1  # the layer of the cache that holds the experts of each token, if they are recorded

_UNSUPPORTED = ("s_aux", "position_bias", "head_mask")
REFUSAL = "the native engine cannot run {}: {}; use `module: transformers` or `vllm`"


class KVCache:
    """Stores keys and values of ``slots`` sequences of up to ``length`` tokens, per layer [slots, length, heads, d]. A
    layer is allocated at its first write, with its own number of heads and head sizes. The operating system commits
    memory as it is touched. ``reserve`` is called with the bytes of all layers before they are allocated."""

    def __init__(self, slots: int, length: int, reserve: Callable[[int], None] = lambda size: None) -> None:
        self.slots, self.length, self.reserve = slots, length, reserve
        self.width = 0  # bytes of a token in all layers
        self.layers: dict[int, tuple[Tensor, ...]] = {}

    def layer(self, index: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Return the storage of layer ``index``, allocated by the shapes of key and value [1, heads, T, head_dim], or
        of EXPERTS [1, layers, T, k]."""
        if index not in self.layers:
            self.width += sum(x.shape[1] * x.shape[3] * x.element_size() for x in new)
            self.reserve(self.slots * self.length * self.width)
            shapes = [(self.slots, self.length, x.shape[1], x.shape[3]) for x in new]
            self.layers[index] = tuple(_allocate(s, x.dtype, x.device) for s, x in zip(shapes, new, strict=True))
        return self.layers[index]

    def resize(self, slots: int, length: int, used: tuple[int, int]) -> None:
        """Reallocate for other numbers of sequences and tokens; the first ``used`` (slots, tokens) are copied."""
        self.reserve(slots * length * self.width)
        used_slots, used_tokens = used
        self.slots, self.length = slots, length
        for index, layer in self.layers.items():
            larger = tuple(_allocate((slots, length, *x.shape[2:]), x.dtype, x.device) for x in layer)
            for new, old in zip(larger, layer, strict=True):
                new[:used_slots, :used_tokens] = old[:used_slots, :used_tokens]
            self.layers[index] = larger

    def read(self, slot: int, length: int) -> list[Tensor]:
        """Copy the keys and values of a slot's first ``length`` tokens, of every layer."""
        return [storage[slot, :length].clone() for pair in self.layers.values() for storage in pair]

    def write(self, slots: slice, tokens: list[Tensor]) -> None:
        """Write what ``read`` returned to the beginning of each of ``slots``."""
        for storage, values in zip((x for pair in self.layers.values() for x in pair), tokens, strict=True):
            storage[slots, : len(values)] = values


class PrefillSequence(NamedTuple):
    """One sequence in the packed rows start..stop-1; its keys and values go to each of ``slots``. The last ``decoded``
    rows are response tokens, computed as DecodeAttention would. If the slots already hold ``past`` tokens, all rows are
    response tokens. ``two_way``: (start, stop) of its tokens that see each other, an image's."""

    start: int
    stop: int
    slots: slice
    decoded: int = 0
    past: int = 0
    two_way: tuple[tuple[int, int], ...] = ()


class PrefillAttention:
    """Attention of prompts that are packed end to end. Rows outside every sequence are padding; their output is 0."""

    def __init__(self, cache: KVCache, sequences: Sequence[PrefillSequence]) -> None:
        self.cache = cache
        self.sequences = sequences

    def store(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Store the keys and values, or the experts, of the rows in the cache. Return the storage."""
        storages = self.cache.layer(layer, *new)
        for start, stop, slots, _, past, _ in self.sequences:
            for storage, x in zip(storages, new, strict=True):
                storage[slots, past : past + stop - start] = x[0, :, start:stop].transpose(0, 1)
        return storages

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, settings: _AttentionSettings) -> Tensor:
        keys, values = self.store(layer, key, value)
        out = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
        if settings.use_flash(query, value) and not any(sequence.two_way for sequence in self.sequences):
            end = self.sequences[-1].stop
            out[0, :end] = settings.attend_slots(query[0, :, :end].transpose(0, 1), keys, values, self.spans)
            return out
        for start, stop, slots, decoded, past, two_way in self.sequences:
            if count := stop - decoded - start:
                padding = (0, 0, 0, -count % ROWS)  # causal: no row sees what follows it
                q, k, v = (F.pad(x[:, :, start : start + count], padding) for x in (query, key, value))
                seen = settings.attend(q, k, v, settings.causal_mask(q.shape[2], q, two_way))
                out[:, start : start + count] = seen[:, :, :count].transpose(1, 2)
            if decoded and operations.has_kernel(query, keys, values):
                rows = torch.arange(stop - decoded, stop)
                slot = torch.full_like(rows, slots.start)
                out[:, rows] = operations.attend_tokens(
                    query[:, :, rows], None, keys, values, rows - start + past, slot, **settings._asdict()
                )
                continue
            # A few rows at a time, as some kernels copy the keys for every row. Never fewer than ROWS, as decoding has:
            # a single row may round differently. The last row is repeated to fill up.
            for row in range(stop - decoded, stop, _ROWS_AT_ONCE):
                end = min(row + _ROWS_AT_ONCE, stop)
                rows = torch.arange(row, row + -(-(end - row) // ROWS) * ROWS, device=query.device).clamp(max=end - 1)
                same = [x[slots.start].expand(len(rows), *x.shape[1:]) for x in (keys, values)]
                single = _SingleTokenAttention(rows - start + past, self.cache.length)
                out[0, row:end] = single.attend(query[:, :, rows], same[0], same[1], settings)[0, : end - row]
        return out

    @cached_property
    def spans(self) -> _SlotSpans:
        """The rows of each sequence, which are packed end to end, and its keys: those of its first slot."""
        first, length = self.sequences[0], self.cache.length
        used = [past + stop - start for start, stop, _, _, past, _ in self.sequences]
        queries = [first.start, *(sequence.stop for sequence in self.sequences)]
        keys = [*(sequence.slots.start * length for sequence in self.sequences), self.cache.slots * length]
        device = next(iter(self.cache.layers.values()))[0].device
        both = torch.tensor([queries, keys, [*used, 0]], dtype=torch.int32).to(device)
        max_queries = max(stop - start for start, stop, *_ in self.sequences)
        return _SlotSpans(both[0], both[1], both[2, :-1], (max_queries, max(used)))


class DecodeAttention:
    """Attention of one new token in each of the slots 0..B-1. ``positions`` i64[B] of the tokens; ``columns`` is
    greater than all of them. ``prefixes`` i64[2, B]: for each token a slot with the same first keys and values, and the
    number of these."""

    def __init__(self, cache: KVCache, positions: Tensor, columns: int, prefixes: Tensor | None = None) -> None:
        self.cache = cache
        self.prefixes = prefixes
        self.single = _SingleTokenAttention(positions, cache.length, columns)
        self.rows = torch.arange(len(positions), device=positions.device) * cache.length + positions

    def store(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Store the keys and values, or the experts, of the tokens in the cache. Return the storage."""
        storages = self.cache.layer(layer, *new)
        for storage, x in zip(storages, new, strict=True):
            flat = storage.view(self.cache.slots * self.cache.length, -1)
            flat.index_copy_(0, self.rows, x[0].transpose(0, 1).reshape(len(self.rows), -1))
        return storages

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, settings: _AttentionSettings) -> Tensor:
        flash = settings.use_flash(query, value)
        if not flash and operations.has_kernel(query, key, value):
            keys, values = self.cache.layer(layer, key, value)
            more = {"prefixes": self.prefixes, **settings._asdict()}
            return operations.attend_tokens(query, (key, value), keys, values, self.single.positions, **more)
        keys, values = self.store(layer, key, value)
        if flash:
            return settings.attend_slots(query[0].transpose(0, 1), keys, values, self.spans)[None]
        count = len(self.rows)
        return self.single.attend(query, keys[:count], values[:count], settings)

    @cached_property
    def spans(self) -> _SlotSpans:
        """One row for each sequence, and the keys of its slot up to that row's own."""
        rows = torch.arange(len(self.rows) + 1, device=self.rows.device, dtype=torch.int32)
        used = (self.single.positions + 1).to(torch.int32)
        return _SlotSpans(rows, rows * self.cache.length, used, (1, self.single.columns))


class _SlotSpans(NamedTuple):
    """Locates N sequences for flash attention: sequence n has the rows queries[n]..queries[n + 1]-1, and its keys
    begin at keys[n] of all slots end to end."""

    queries: Tensor  # i32[N + 1]
    keys: Tensor  # i32[N + 1]
    used: Tensor  # i32[N]: keys of each sequence
    longest: tuple[int, int]  # the most queries and keys of one


class _SingleTokenAttention:
    """Attention of single tokens at ``positions`` i64[B], each to the stored keys and values of its own sequence."""

    def __init__(self, positions: Tensor, length: int, columns: int | None = None) -> None:
        columns = int(positions.max()) + 1 if columns is None else columns
        self.positions = positions
        self.columns = min(-(-columns // STRIDE) * STRIDE, length)
        self.masks: dict[int | None, Tensor] = {}

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, settings: _AttentionSettings) -> Tensor:
        """query [1, heads, B, d]; keys, values [B, length, kv heads, d] -> [1, B, heads, d]."""
        batch, heads, groups = query.shape[2], query.shape[1], keys.shape[2]
        keys, values = (x[:, : self.columns].transpose(1, 2) for x in (keys, values))
        # The query heads that share a key head are the rows of one product, so keys are not repeated. The rows are
        # padded to a multiple of four: with any other number, the buffers of torch's attention are aligned differently
        # in each thread, and MKL rounds by the alignment of its operands.
        shared = heads // groups
        q = F.pad(query[0].transpose(0, 1).reshape(batch, groups, shared, -1), (0, 0, 0, -shared % 4))
        out = settings.attend(q, keys, values, self._mask(settings.window, query.dtype))
        return out[:, :, :shared].reshape(1, batch, heads, -1).contiguous()  # some models take views of it

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return the additive mask [B, 1, 1, columns]: a token sees its past, at most ``window`` tokens of it."""
        if window not in self.masks:
            column = torch.arange(self.columns, device=self.positions.device)
            distance = self.positions[:, None] - column
            visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))
            self.masks[window] = mask[:, None, None]
        return self.masks[window]


class _AttentionSettings(NamedTuple):
    """One layer's attention: scale, sliding window (tokens) and soft cap of the scores, as transformers passes them."""

    scale: float | None
    window: int | None
    softcap: float | None

    def use_flash(self, query: Tensor, value: Tensor) -> bool:
        """Whether flash attention computes this layer: on CUDA, in 16 bits, without a soft cap."""
        plain = self.softcap is None and query.shape[3] == value.shape[3]
        return plain and has_varlen(*SLOT_ARGUMENTS) and choose_kernel(value.dtype, value.device) == "varlen"

    def attend_slots(self, query: Tensor, keys: Tensor, values: Tensor, spans: _SlotSpans) -> Tensor:
        """One call of flash attention: query [T, heads, d], keys and values [slots, length, kv heads, d] -> [T, heads,
        d]. A sequence's last row is aligned with its last key."""
        # Without splits of the keys a sequence gets the same bits beside longer ones.
        return attend_flash(
            query, keys.flatten(0, 1), values.flatten(0, 1), (spans.queries, spans.keys), spans.longest,
            self.scale, self.window, seqused_k=spans.used, num_splits=1,
        )  # fmt: skip

    def causal_mask(self, length: int, query: Tensor, two_way: Sequence[tuple[int, int]] = ()) -> Tensor | None:
        """Return the additive mask [length, length], or None where SDPA's own causal mask is enough."""
        if self.softcap is None and (self.window is None or self.window >= length) and not two_way:
            return None
        row = torch.arange(length, device=query.device)
        distance = row[:, None] - row
        later = distance < 0
        for start, stop in two_way:
            later[start:stop, start:stop] = False
        hidden = later | (distance >= (self.window or length))
        return query.new_zeros(length, length).masked_fill_(hidden, float("-inf"))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """query [B, heads, rows, d], key / value [B, kv heads, columns, d]; no mask: causal, rows = columns."""
        repeat = query.shape[1] // key.shape[1]
        if self.softcap is None:
            settings: dict[str, Any] = {"attn_mask": mask, "is_causal": mask is None, "scale": self.scale}
            return F.scaled_dot_product_attention(query, key, value, **settings, enable_gqa=repeat > 1)
        if repeat > 1:
            key, value = (x.repeat_interleave(repeat, 1) for x in (key, value))
        assert mask is not None  # causal_mask returns one for a soft cap
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        # The products get contiguous matrices: strides choose the kernel, and they depend on the batch.
        keys = key.transpose(2, 3).contiguous()
        scores = torch.tanh(query.contiguous() @ keys * (scale / self.softcap)) * self.softcap + mask
        return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value.contiguous()


class ShapeOnlyAttention:
    """Attention of a model on the meta device, where only the shape of the output matters."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, settings: _AttentionSettings) -> Tensor:
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate zeros: a masked column still takes part in products, so it must not hold a NaN. On CPU these are
    untouched pages. torch.zeros would write, and so commit, memory that short responses never use."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, max(1, math.prod(shape) * dtype.itemsize))
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    kv: PrefillAttention | DecodeAttention | ShapeOnlyAttention | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **rest: object,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, heads, T, d], key, value [1, kv heads, T, d] -> [1, T, heads, d]."""
    layer_class = type(module).__name__
    if kv is None:
        raise UnsupportedAttention(REFUSAL.format(layer_class, "its model does not hand keyword arguments to it"))
    if not getattr(module, "is_causal", True):
        raise UnsupportedAttention(REFUSAL.format(layer_class, "it is not causal"))
    if unknown := [name for name in _UNSUPPORTED if rest.get(name) is not None]:
        raise UnsupportedAttention(REFUSAL.format(layer_class, f"its attention asks for {unknown}"))
    settings = _AttentionSettings(scaling, sliding_window, softcap)
    return kv.attend(cast(int, module.layer_idx), query, key, value, settings), None


@cache
def register_attention() -> str:
    """Make the engine's attention known to transformers, and return its name there."""
    from transformers import AttentionInterface  # slow

    AttentionInterface.register(NAME, attention)
    return NAME
