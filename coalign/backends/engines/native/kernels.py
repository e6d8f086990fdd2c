"""Linear layers for inference on CPU, and the choice of the kernel that computes them on this machine.

A kernel is invariant if a row of its result has the same bits in any batch, however many rows there are. Whether it is
depends on the processor, and so does its speed. Both are measured before a model of these shapes is first used, and the
fastest invariant kernel is chosen. Speed is that of one thread by its processor time, the best of several rounds: what
else the machine does must not decide. The choice is kept in a file for this machine, so that all processes and later
runs make the same one. Delete it to measure again.

On another device, in a dtype without a kernel, and outside of nn.Linear (experts, GPT-2's Conv1D) layers stay plain.
Log-probs may then differ in their last bits between batches.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coalign.files import find_cache
from coalign.processes.host import describe_processor

log = logging.getLogger(__name__)

TILE = 64
Product = Callable[[Tensor], Tensor]  # rows [R, in] -> [R, out]
Shape = tuple[int, int]  # (in, out) of a layer

# Row counts at which a step of decoding is timed, and at which rows are compared with those of the first count.
_TIMED = (8, TILE)
_COMPARED = (8, 16, 24, TILE, 72, 136)
_MEASURED_ELEMENTS = 2**22  # a weight with more is measured by its first outputs
_ROUNDS, _MAX_ROUNDS = 3, 12
_FAR_SLOWER = 1.5  # a round is repeated if a kernel took this many times its best
_MEASURE = "processor time of one thread"  # choices that were measured in another way are made again
_BETTER = 0.9  # a later kernel is chosen only if it takes less than this share of an earlier one's time


def _plain(weight: Tensor, bias: Tensor | None) -> Product:
    return lambda rows: F.linear(rows, weight, bias)


def _mkl(weight: Tensor, bias: Tensor | None) -> Product:
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, TILE)
    # The last argument is the row count the weight was packed for. With any other than the actual one the operator
    # falls back to an unpacked product, although MKL itself takes any row count.
    return lambda rows: torch.ops.mkl._mkl_linear(rows, packed, weight, bias, len(rows))


def _onednn(weight: Tensor, bias: Tensor | None) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, TILE)
    return lambda rows: multiply_by_onednn(rows, packed, bias)


def _onednn_tiles(weight: Tensor, bias: Tensor | None) -> Product:
    """Compute with oneDNN on tiles of exactly TILE rows, so that its shape never changes."""
    tile_product = _onednn(weight, bias)

    def product(rows: Tensor) -> Tensor:
        tiles = F.pad(rows, (0, 0, 0, -len(rows) % TILE)).split(TILE)
        out = [tile_product(tile) for tile in tiles]
        return torch.cat(out)[: len(rows)] if len(out) > 1 else out[0][: len(rows)]

    return product


# dtype -> kernels by name; of two that are equally fast the first is chosen.
KERNELS: dict[torch.dtype, dict[str, Callable[[Tensor, Tensor | None], Product]]] = {
    torch.float32: {"mkl": _mkl, "onednn": _onednn, "onednn_tiles": _onednn_tiles, "plain": _plain},
    torch.bfloat16: {"onednn_tiles": _onednn_tiles, "onednn": _onednn, "plain": _plain},
}
FLOAT32_INSTEAD = "`compute_dtype: bfloat16` is computed in float32"


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The kernel for the linear layers of a model. gflops: measured speed of every kernel of this machine, in 10⁹
    floating point operations per second of one thread. variant: the kernels that are not invariant."""

    name: str
    dtype: str
    gflops: Mapping[str, float]
    variant: tuple[str, ...] = ()

    @property
    def is_invariant(self) -> bool:
        return self.name not in self.variant

    def product(self, weight: Tensor, bias: Tensor | None) -> Product:
        """Return the function rows [R, in] -> [R, out] with a packed copy of weight [out, in] and bias [out]."""
        return KERNELS[weight.dtype][self.name](weight, bias)

    def __str__(self) -> str:
        rates = ", ".join(
            f"{name} {rate:.0f}{' (rows depend on their batch)' if name in self.variant else ''}"
            for name, rate in self.gflops.items()
            if name != self.name
        )
        return f"{self.dtype} linear layers by {self.name}, {self.gflops[self.name]:.0f} GFLOP/s a thread ({rates})"


@cache
def choose_kernel(layers: tuple[tuple[Shape, int], ...], dtype: torch.dtype) -> KernelChoice | None:
    """Choose the kernel for linear layers (((in, out), how many), …), sorted, on this machine's CPU; None where there
    are none, or none for the dtype. The choice is read from the machine's file, or measured and written there."""
    if not layers or dtype not in KERNELS:
        return None
    choice = _keep(_cache_file(layers, dtype), lambda: _measure_kernels(dict(layers), dtype))
    log.info("native engine: %s", choice)
    return choice


def is_measured(layers: tuple[tuple[Shape, int], ...], dtype: torch.dtype) -> bool:
    """Whether `choose_kernel` answers at once: its choice is kept, or there is nothing to choose."""
    return not layers or dtype not in KERNELS or _cache_file(layers, dtype).is_file()


def list_variant_linears(kernel: KernelChoice | None, dtype: torch.dtype, device: torch.device) -> list[str]:
    """List the linear layers, in words, if they may round a row differently in another batch."""
    if kernel is None:
        return [f"linear layers in {dtype} on {device.type}"]
    return [] if kernel.is_invariant else [f"linear layers by {kernel.name}"]


@torch.inference_mode()
def _measure_kernels(layers: Mapping[Shape, int], dtype: torch.dtype) -> KernelChoice:
    """Time every kernel of this machine on layers {(in, out): how many}; compare its rows in several batches."""
    seconds: dict[str, float] = {}
    variant: set[str] = set()
    missing: set[str] = set()
    for (inputs, outputs), count in layers.items():
        width = min(outputs, max(1024, _MEASURED_ELEMENTS // inputs))
        weight, rows = _random(width, inputs, dtype=dtype), _random(max(_COMPARED), inputs, dtype=dtype)
        calls: dict[str, list[Callable[[], object]]] = {}
        for name, pack in KERNELS[dtype].items():
            try:
                product = pack(weight, None)
                if not _is_invariant(product, rows):
                    variant.add(name)
            except RuntimeError:  # torch was built without this library, or the processor lacks the instructions
                missing.add(name)
                continue
            calls[name] = [partial(product, rows[:size]) for size in _TIMED]
        for name, taken in _time_in_turns(calls).items():
            seconds[name] = seconds.get(name, 0.0) + count * outputs / width * taken
    seconds = {name: taken for name, taken in seconds.items() if name not in missing}
    candidates = [name for name in seconds if name not in variant] or list(seconds)
    best = candidates[0]
    for name in candidates[1:]:
        if seconds[name] < _BETTER * seconds[best]:
            best = name
    flops = sum(2 * a * b * count for (a, b), count in layers.items()) * sum(_TIMED)
    gflops = {name: round(flops / taken / 1e9, 1) for name, taken in seconds.items()}
    return KernelChoice(best, str(dtype).removeprefix("torch."), gflops, tuple(sorted(variant)))


def _time_in_turns(calls: Mapping[str, Sequence[Callable[[], object]]]) -> dict[str, float]:
    """Return the processor seconds of each entry's calls together on one thread, the best of several rounds. Another
    round follows while one was far slower than the best: the machine was busy with something else."""
    best = {(name, i): math.inf for name, several in calls.items() for i in range(len(several))}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for number in range(_MAX_ROUNDS):
            taken = {(name, i): _time_call(calls[name][i]) for name, i in best}
            is_calm = all(taken[key] < _FAR_SLOWER * best[key] for key in best)
            best = {key: min(best[key], taken[key]) for key in best}
            if number + 1 >= _ROUNDS and is_calm:
                break
    finally:
        torch.set_num_threads(threads)
    return {name: sum(best[name, i] for i in range(len(several))) for name, several in calls.items()}


def _time_call(call: Callable[[], object]) -> float:
    """Return this thread's processor seconds for a call: the least of several, as other load only adds to them."""
    call()
    best, spent, runs = math.inf, 0.0, 0
    while runs < 3 or (runs < 10 and spent < 0.01):
        started = time.thread_time()
        call()
        took = time.thread_time() - started
        best, spent, runs = min(best, took), spent + took, runs + 1
    return best


def _is_invariant(product: Product, rows: Tensor) -> bool:
    expected = product(rows[: _COMPARED[0]])
    for count in _COMPARED:
        # The same rows at the beginning and at the end of a batch.
        first = product(rows[:count])[: len(expected)]
        last = product(rows[:count].roll(count - len(expected), 0))[count - len(expected) :]
        if not (torch.equal(first, expected) and torch.equal(last, expected)):
            return False
    return True


def _random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def choose_compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return float32 instead of bfloat16 on a CPU without instructions for it, otherwise ``dtype``. There float32 is 10
    to 100 times as fast, and no less exact."""
    slow = dtype == torch.bfloat16 and device.type == "cpu" and not has_bf16()
    return torch.float32 if slow else dtype


@cache
def multiplies_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices at least half as fast as float32 ones; kept in a file."""
    return _keep(_cache_file((), torch.bfloat16), _measure_bf16).name == "bfloat16"


@cache
def has_bf16() -> bool:
    """Whether bfloat16 that settings ask for is computed as such on this CPU; warns once if not."""
    if not multiplies_bf16():
        log.warning("this processor has no fast bfloat16: %s", FLOAT32_INSTEAD)
    return multiplies_bf16()


def _measure_bf16() -> KernelChoice:
    squares = {name: _random(256, 256, dtype=getattr(torch, name)) for name in ("float32", "bfloat16")}
    rates = _measure_rates({name: partial(torch.matmul, a, a) for name, a in squares.items()}, 256)
    return KernelChoice("bfloat16" if rates["bfloat16"] >= 0.5 * rates["float32"] else "float32", "bfloat16", rates)


def _measure_rates(products: Mapping[str, Callable[[], object]], size: int) -> dict[str, float]:
    """The GFLOP/s of products of two matrices [size, size]."""
    seconds = _time_in_turns({name: [product] for name, product in products.items()})
    return {name: round(2 * size**3 / taken / 1e9, 1) for name, taken in seconds.items()}


@cache
def is_onednn_faster() -> bool:
    """Whether oneDNN multiplies float32 matrices clearly faster than torch does by itself; kept in a file. On x86 torch
    calls MKL, which uses few of the instructions of an AMD processor."""
    return _keep(_cache_file((), torch.float32), _measure_onednn).name == "onednn"


@torch.inference_mode()
def _measure_onednn() -> KernelChoice:
    weight = _random(1024, 1024, dtype=torch.float32)
    products: dict[str, Callable[[], object]] = {"plain": partial(F.linear, weight, weight)}
    with suppress(RuntimeError):  # torch was built without oneDNN
        multiply_by_onednn(weight, weight)
        products["onednn"] = partial(multiply_by_onednn, weight, weight)
    rates = _measure_rates(products, 1024)
    best = "onednn" if rates.get("onednn", 0) > 1.25 * rates["plain"] else "plain"
    return KernelChoice(best, "float32", rates)


def multiply_by_onednn(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """rows [..., in] · weightᵀ [in, out] + bias [out], without a gradient."""
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")


def _cache_file(layers: tuple[tuple[Shape, int], ...], dtype: torch.dtype) -> Path:
    machine = (_MEASURE, describe_processor(), torch.__version__)
    key = hashlib.sha256(repr((*machine, str(dtype), layers)).encode()).hexdigest()[:24]
    return find_cache() / "kernels" / f"{key}.json"


def _read(file: Path) -> KernelChoice | None:
    try:
        kept = json.loads(file.read_text())
        return KernelChoice(kept["name"], kept["dtype"], kept["gflops"], tuple(kept["variant"]))
    except (OSError, ValueError, KeyError):
        return None


def _keep(file: Path, make: Callable[[], KernelChoice]) -> KernelChoice:
    """Return the choice in the file, or make and write it; if another process was first, return that one's."""
    if (kept := _read(file)) is not None:
        return kept
    choice = make()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent) as out:
            json.dump(asdict(choice), out, indent=1)
            out.flush()
            with suppress(FileExistsError):
                os.link(out.name, file)
    except OSError as problem:
        remedy = "another process may choose others, which round differently; set COALIGN_CACHE to a writable directory"
        log.warning("the choice of kernels cannot be kept (%s): %s", problem, remedy)
        return choice
    return _read(file) or choice


class PackedLinear(nn.Linear):
    """An nn.Linear that computes with a packed copy of its weight, if it has one."""

    product: Product | None = None

    def forward(self, input: Tensor) -> Tensor:
        if self.product is None:
            return F.linear(input, self.weight, self.bias)
        rows = input.reshape(-1, self.in_features)
        return self.product(rows).view(*input.shape[:-1], self.out_features)

    def pack(self, kernel: KernelChoice) -> None:
        """Pack the current weight; call again after it changed."""
        self.product = kernel.product(self.weight, self.bias)


def replace_linears(model: nn.Module) -> list[PackedLinear]:
    """Replace every nn.Linear of ``model`` by a PackedLinear with the same parameters; return the new layers."""
    replaced = []
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            linear = PackedLinear(module.in_features, module.out_features, module.bias is not None, device="meta")
            linear.weight, linear.bias = module.weight, module.bias
            model.set_submodule(name, linear)
            replaced.append(linear)
    return replaced
