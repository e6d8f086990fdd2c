"""What the kernels of kernels.cpp compute, on tensors.

Each function says what it takes; `has_kernel` says for which tensors. A row's result has the same bits whatever other
rows there are, and for any number of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from coalign_cpu.library import load_kernels

DTYPES = (torch.float32, torch.bfloat16)
_GRADIENT_ROWS = 64  # ROWS in kernels.cpp
_ADDRESS, _INTEGER, _FLOAT, _FLAG = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
# The types of each function's arguments, in the order of kernels.cpp.
_SIGNATURES = {
    "attend_tokens_of": (_FLAG, *[_ADDRESS] * 10, _FLOAT, _FLOAT, _INTEGER, _FLAG),
    "draw_tokens_of": (_FLAG, _ADDRESS, *[_INTEGER] * 3, _ADDRESS, _FLOAT, _ADDRESS, _ADDRESS, _FLAG),
    "add_tile_of": (_FLAG, _ADDRESS, *[_INTEGER] * 2, _FLOAT, _FLOAT, _ADDRESS, _INTEGER, *[_ADDRESS] * 4, _FLAG),
    "turn_into_errors_of": (
        *(_FLAG, _ADDRESS, *[_INTEGER] * 2, _FLOAT, _FLOAT, _ADDRESS, _INTEGER),
        *([_ADDRESS] * 4),
        _FLAG,
    ),
    "normalise_of": (_FLAG, _FLAG, _ADDRESS, _ADDRESS, _INTEGER, _INTEGER, _FLOAT, _ADDRESS, _ADDRESS, _FLAG),
    "normalise_back_of": (_FLAG, _FLAG, *[_ADDRESS] * 4, _INTEGER, _INTEGER, _ADDRESS, _ADDRESS, _FLAG),
    "gate_silu_of": (_FLAG, _ADDRESS, _ADDRESS, _INTEGER, _ADDRESS, _FLAG),
    "gate_silu_back_of": (_FLAG, *[_ADDRESS] * 3, _INTEGER, _ADDRESS, _ADDRESS, _FLAG),
    "copy_blocks_of": (*[_ADDRESS] * 3, *[_INTEGER] * 4, ctypes.c_uint64, _ADDRESS, _FLAG),
}


def has_kernel(*tensors: Tensor) -> bool:
    """Whether the kernels compute with these tensors: on the CPU, of one dtype that they know, and compiled at all."""
    return all(tensor.dtype == tensors[0].dtype for tensor in tensors) and has_layer_kernel(*tensors)


def has_layer_kernel(*tensors: Tensor) -> bool:
    """Whether the kernels compute with these tensors, whatever the dtype of each, as far as they know it."""
    return all(tensor.dtype in DTYPES for tensor in tensors) and has_copy_kernel(*tensors)


def has_copy_kernel(*tensors: Tensor) -> bool:
    """Whether the kernels take the bytes of these tensors: plain ones (no DTensor) on the CPU, and compiled at all."""
    plain = all(type(tensor) in (Tensor, Parameter) and tensor.device.type == "cpu" for tensor in tensors)
    return plain and _functions() is not None


def attend_tokens(
    query: Tensor,
    new: tuple[Tensor, Tensor] | None,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    slots: Tensor | None = None,
    *,
    prefixes: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of single tokens, each to the stored keys of its own sequence up to its position: [1, T, heads, d].

    query [1, heads, T, d]; keys, values [slots, length, kv heads, d]; ``positions`` and ``slots`` i64[T] (None: token t
    is in slot t). ``new``: keys and values [1, kv heads, T, d] that are written to their positions first. ``prefixes``
    i64[2, T]: a slot whose first keys and values are those of the token's own, and how many; reading them once for
    several tokens saves time. ``window``: the most tokens that one sees, itself included. ``softcap``: of the scores.
    """
    functions = _kernels()
    inputs = [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (query, *(new or ()))]
    q, (k, v) = inputs[0], inputs[1:] or (keys[0, :, :, None], values[0, :, :, None])
    _, heads, rows, width = q.shape
    sizes = (
        *(rows, heads, keys.shape[2], width, values.shape[3], keys.shape[1]),
        *(stride for x in (q, k, v) for stride in (x.stride(2), x.stride(1))),
    )
    out = q.new_empty(1, rows, heads, values.shape[3])
    addresses = [x.data_ptr() for x in (k, v)] if new else [None, None]
    functions.attend_tokens_of(
        *(q.dtype == torch.bfloat16, q.data_ptr(), *addresses, keys.data_ptr(), values.data_ptr(), out.data_ptr()),
        *(None if slots is None else slots.data_ptr(), positions.data_ptr()),
        *(None if prefixes is None else prefixes.data_ptr(), (_INTEGER * len(sizes))(*sizes)),
        *(width**-0.5 if scale is None else scale, softcap or 0.0, window or 0, torch.get_num_threads()),
    )
    return out


def draw_tokens(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Draw one token for each row by inverse CDF at ``uniform`` f64[B] from softmax(logits [B, V] / temperature).

    Returns tokens i64[B] and their log-probs f32[B]. Logits that are no numbers give a log-prob of nan.
    """
    functions = _kernels()
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    rows, size = logits.shape
    tokens, logprobs = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    functions.draw_tokens_of(
        *(logits.dtype == torch.bfloat16, logits.data_ptr(), rows, size, logits.stride(0)),
        *(uniform.contiguous().data_ptr(), 1 / temperature, tokens.data_ptr(), logprobs.data_ptr()),
        torch.get_num_threads(),
    )
    return tokens, logprobs


def add_tile(
    products: Tensor,
    inner: float,
    outer: float | None,
    targets: Tensor,
    start: int,
    sums: tuple[Tensor, Tensor, Tensor | None, Tensor],
) -> None:
    """Add the tokens start..start+n-1 of the vocabulary to the softmax of each row of ``products`` [M, n].

    The logit z is inner · product, or outer · tanh(inner · product). ``targets`` i64[M]. ``sums``, f32[M] each, change
    in place: the highest z so far, Σ exp(z - highest), if wanted Σ exp(z - highest) · (z - highest), the target's z.
    """
    functions = _kernels()
    functions.add_tile_of(
        *(products.dtype == torch.bfloat16, products.data_ptr(), *products.shape, inner, outer or 0.0),
        *(targets.data_ptr(), start, *(None if x is None else x.data_ptr() for x in sums), torch.get_num_threads()),
    )


def turn_into_errors(
    products: Tensor,
    inner: float,
    outer: float | None,
    targets: Tensor,
    start: int,
    normaliser: Tensor,
    grad: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
) -> None:
    """Replace ``products`` [M, n], of which `add_tile` says more, by minus the gradient of inner · product.

    ``grad`` f32[M] is the gradient of the log-probs, by which the result is divided unless there is ``entropy``: the
    gradient of the entropy f32[M], and the entropy itself. ``normaliser`` f32[M]: the log-sum-exp.
    """
    functions = _kernels()
    of_entropy = (None, None) if entropy is None else (entropy[0].data_ptr(), entropy[1].data_ptr())
    functions.turn_into_errors_of(
        *(products.dtype == torch.bfloat16, products.data_ptr(), *products.shape, inner, outer or 0.0),
        *(targets.data_ptr(), start, normaliser.data_ptr(), grad.data_ptr(), *of_entropy, torch.get_num_threads()),
    )


def normalise(x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return weight [H] · x [..., H] · s in ``dtype``, and s = 1 / √(mean(x²) + ε) f32[rows]."""
    functions, width = _kernels(), x.shape[-1]
    x, weight = x.contiguous(), weight.float().contiguous()
    rows = x.numel() // width
    out, scales = torch.empty(x.shape, dtype=dtype), torch.empty(rows)
    functions.normalise_of(
        *(x.dtype == torch.bfloat16, dtype == torch.bfloat16, x.data_ptr(), weight.data_ptr(), rows, width, epsilon),
        *(out.data_ptr(), scales.data_ptr(), torch.get_num_threads()),
    )
    return out, scales


def normalise_back(x: Tensor, weight: Tensor, scales: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x [..., H], in its dtype, and of weight [H], in float32, from that of `normalise`'s
    result. x and that gradient are contiguous."""
    functions, width = _kernels(), x.shape[-1]
    weight = weight.float().contiguous()
    rows = x.numel() // width
    of_x, addends = torch.empty_like(x), torch.empty(-(-rows // _GRADIENT_ROWS), width)
    functions.normalise_back_of(
        *(x.dtype == torch.bfloat16, grad.dtype == torch.bfloat16, x.data_ptr(), weight.data_ptr(), scales.data_ptr()),
        *(grad.data_ptr(), rows, width, of_x.data_ptr(), addends.data_ptr(), torch.get_num_threads()),
    )
    return of_x, addends.sum(0)


def gate_silu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up, both of one shape and dtype."""
    functions = _kernels()
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    functions.gate_silu_of(
        *(gate.dtype == torch.bfloat16, gate.data_ptr(), up.data_ptr(), gate.numel(), out.data_ptr()),
        torch.get_num_threads(),
    )
    return out


def gate_silu_back(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up from that of silu(gate) · up."""
    functions = _kernels()
    gate, up, grad = gate.contiguous(), up.contiguous(), grad.contiguous()
    of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
    functions.gate_silu_back_of(
        *(gate.dtype == torch.bfloat16, gate.data_ptr(), up.data_ptr(), grad.data_ptr(), gate.numel()),
        *(of_gate.data_ptr(), of_up.data_ptr(), torch.get_num_threads()),
    )
    return of_gate, of_up


@dataclass(frozen=True, slots=True)
class ChecksumShares:
    """Which bytes of a block a checksum looks at: with ``turn`` t every piece number t, t + ``shares``, …; or all.

    The checksum is the sum over these bytes' 64-bit words of word_i · (i · ``step`` + 1), and their number, mod 2^64.
    """

    piece: int  # bytes
    shares: int
    step: int
    turn: int | None = None


def sum_blocks(blocks: Sequence[Tensor | np.ndarray], shares: ChecksumShares, threads: int) -> list[int]:
    """Return the checksum of each block u8[n]."""
    return _copy_blocks(blocks, None, shares, threads)


def copy_blocks(pairs: Sequence[tuple[Tensor, Tensor]], shares: ChecksumShares, threads: int) -> list[int]:
    """Copy each block u8[n] into its target u8[n], past the caches; return the checksums of the blocks."""
    return _copy_blocks([block for block, _ in pairs], [target for _, target in pairs], shares, threads)


def _copy_blocks(
    blocks: Sequence[Tensor | np.ndarray], targets: Sequence[Tensor] | None, shares: ChecksumShares, threads: int
) -> list[int]:
    functions, count = _kernels(), len(blocks)
    addresses = lambda arrays: (_ADDRESS * count)(*map(_find_address, arrays))  # noqa: E731
    sums = (ctypes.c_uint64 * count)()
    functions.copy_blocks_of(
        *(addresses(blocks), None if targets is None else addresses(targets)),
        *((_INTEGER * count)(*(block.nbytes for block in blocks)), count, -1 if shares.turn is None else shares.turn),
        *(shares.piece, shares.shares, shares.step, sums, threads),
    )
    return list(sums)


def _find_address(data: Tensor | np.ndarray) -> int:
    return data.data_ptr() if isinstance(data, Tensor) else data.ctypes.data


def _kernels() -> ctypes.CDLL:
    functions = _functions()
    assert functions is not None, "has_kernel says whether there are any"
    return functions


@cache
def _functions() -> ctypes.CDLL | None:
    """The kernels, their arguments declared."""
    library = load_kernels()
    for name, types in _SIGNATURES.items() if library else ():
        function = getattr(library, name)
        function.argtypes, function.restype = types, None
    return library
