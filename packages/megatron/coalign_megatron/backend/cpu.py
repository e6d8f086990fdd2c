"""Runs megatron-core on a machine without a GPU: within `on_cpu` its CUDA calls are answered by the CPU.

Written for 0.16.1; on a GPU nothing of this is used. It replaces random-number states, the current device, streams, and
the creation and types of CUDA tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch import Tensor
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class _CudaTensorsOnCpu(TorchFunctionMode):
    """Creates `cuda` tensors on the CPU, and reports their type as CUDA's, which optimizers test."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        if torch.device(kwargs.get("device") or CPU).type == "cuda":
            kwargs["device"] = CPU
        return func(*args, **kwargs)


class _Stream:
    """A stream and its events. On CPU every call has finished when it returns, so nothing waits."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None:
        pass


def _counts(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    """Convert token counts of ranks to numpy, which megatron-core does only for tensors on a GPU."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


all_gather = dist.all_gather


def _all_gather(outputs: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Gather tensors of different lengths (tokens for experts); gloo needs equal ones, so they are padded."""
    longest = max(map(len, outputs))
    if all(len(output) == longest for output in outputs):
        return all_gather(outputs, tensor, group, async_op)
    padded = tensor.new_zeros(longest, *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    gathered = [torch.empty_like(padded) for _ in outputs]
    all_gather(gathered, padded, group)
    for output, received in zip(outputs, gathered, strict=True):
        output.copy_(received[: len(output)])


def _reduce_scatter(out: Tensor, inputs: list[Tensor], group: Any = None, **_: Any) -> None:
    """Sum and split what `_all_gather` gathered."""
    total = torch.cat([tensor.reshape(len(tensor), -1) for tensor in inputs])
    dist.all_reduce(total, group=group)
    out.copy_(total.split([len(tensor) for tensor in inputs])[dist.get_rank(group)].view_as(out))


class _Tracker(random.CudaRNGStatesTracker):
    """Keeps named states of the CPU's only generator; leaving a state restores the one before."""

    def add(self, name: str, seed: int) -> None:
        self._is_initialized = True
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()

    @contextmanager
    def fork(self, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        previous = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(previous)


TRACKER = _Tracker()


@contextmanager
def on_cpu() -> Iterator[None]:
    """Let megatron-core build, run, step, save and load models on the CPU within this context."""
    stand_ins = [
        (torch.cuda, "current_device", lambda: CPU),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.cuda, "empty_cache", lambda: None),
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "current_stream", _Stream),
        (torch.cuda, "default_stream", _Stream),
        (torch.cuda, "stream", lambda _: nullcontext()),
        (dist, "all_gather", _all_gather),
        (dist, "reduce_scatter", _reduce_scatter),
        (token_dispatcher, "maybe_move_tensor_to_cpu", _counts),
        (random, "_CUDA_RNG_STATE_TRACKER", TRACKER),
        (random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True),
        (random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
        (random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
    ]
    with ExitStack() as stack:
        for owner, name, value in stand_ins:
            stack.enter_context(patch.object(owner, name, value))
        # 0.16.1 uses this function of Transformer Engine without testing whether it is installed.
        stack.enter_context(patch.object(moe_utils, "te_general_gemm", None, create=True))
        stack.enter_context(_CudaTensorsOnCpu())
        yield
