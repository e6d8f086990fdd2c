"""Which kernel computes the linear layers on this machine: the fastest of those that are invariant.

A kernel is invariant if a row of its result has the same bits in any batch: a matrix product may round a row
differently when the number of rows changes, because the library picks another kernel or another split of the inner
sum. Whether it does depends on the processor, and so does the speed. So both are measured when an engine first loads a
model of these shapes, and the choice is kept in a file for this machine: processes and later runs make the same one,
whatever else the machine is doing. Delete the file to measure again.

A linear layer for inference on CPU: its weight packed for the matrix units, rows independent of their batch.

coalign.backends.engines.native.kernels chooses the kernel. On another device, and in a dtype for which there is none, the layer is a
plain nn.Linear. Weights that are not in an nn.Linear (the experts of a mixture, GPT-2's Conv1D) keep transformers'
arithmetic. In these cases log-probs may differ in their last bits from one batch to another (coalign.backends.engines.native.model).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

log = logging.getLogger(__name__)

TILE = 64
Product = Callable[[Tensor], Tensor]  # rows [R, in] -> [R, out]
Shape = tuple[int, int]  # (in, out) of a layer

# Row counts at which a step of decoding is timed, and at which rows are compared with those of the first count.
_TIMED = (8, TILE)
_COMPARED = (8, 16, 24, TILE, 72, 136)
_ELEMENTS = 2**22  # of a weight that is measured: of a wide layer the first outputs stand for all
_BETTER = 0.9  # another kernel than the first has to take less than this share of its time
_ENVIRONMENT = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")


def _plain(weight: Tensor, bias: Tensor | None) -> Product:
    return lambda rows: F.linear(rows, weight, bias)


def _mkl(weight: Tensor, bias: Tensor | None) -> Product:
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, TILE)
    # The last argument is the row count the weight was packed for; anything else than the actual one makes the
    # operator fall back to an unpacked product. MKL itself takes any row count.
    return lambda rows: torch.ops.mkl._mkl_linear(rows, packed, weight, bias, len(rows))


def _onednn(weight: Tensor, bias: Tensor | None) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, TILE)
    return lambda rows: torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")


def _onednn_tiles(weight: Tensor, bias: Tensor | None) -> Product:
    """oneDNN on tiles of exactly TILE rows: its shape never changes."""
    tile_product = _onednn(weight, bias)

    def product(rows: Tensor) -> Tensor:
        tiles = F.pad(rows, (0, 0, 0, -len(rows) % TILE)).split(TILE)
        out = [tile_product(tile) for tile in tiles]
        return torch.cat(out)[: len(rows)] if len(out) > 1 else out[0][: len(rows)]

    return product


# By dtype, the first where two are equally fast.
KERNELS: dict[torch.dtype, dict[str, Callable[[Tensor, Tensor | None], Product]]] = {
    torch.float32: {"mkl": _mkl, "onednn": _onednn, "onednn_tiles": _onednn_tiles, "plain": _plain},
    torch.bfloat16: {"onednn_tiles": _onednn_tiles, "onednn": _onednn, "plain": _plain},
}
FLOAT32_INSTEAD = "what `compute_dtype: bfloat16` asks for is computed in float32"


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The kernel for the linear layers of a model.

    gflops: measured for every kernel that this machine has, in 10⁹ floating point operations a second. variant: those
    of them that are not invariant.
    """

    name: str
    dtype: str
    gflops: Mapping[str, float]
    variant: tuple[str, ...] = ()

    @property
    def is_invariant(self) -> bool:
        return self.name not in self.variant

    def product(self, weight: Tensor, bias: Tensor | None) -> Product:
        """rows [R, in] -> [R, out] with a packed copy of weight [out, in] and bias [out]."""
        return KERNELS[weight.dtype][self.name](weight, bias)

    def __str__(self) -> str:
        others = ", ".join(
            f"{name} {rate:.0f}{' (rows depend on their batch)' if name in self.variant else ''}"
            for name, rate in self.gflops.items()
            if name != self.name
        )
        return f"{self.dtype} linear layers by {self.name}, {self.gflops[self.name]:.0f} GFLOP/s ({others})"


def choose(shapes: Iterable[Shape], dtype: torch.dtype) -> KernelChoice:
    """The kernel for linear layers of these shapes (in, out), one for each layer, on this machine's CPU.

    Read from the machine's file, or measured and written there.
    """
    return _choose(tuple(sorted(Counter(shapes).items())), dtype)


@cache
def _choose(layers: tuple[tuple[Shape, int], ...], dtype: torch.dtype) -> KernelChoice:
    choice = _keep(_file(layers, dtype), lambda: measure(dict(layers), dtype))
    log.info("native engine: %s", choice)
    return choice


@torch.inference_mode()
def measure(layers: Mapping[Shape, int], dtype: torch.dtype) -> KernelChoice:
    """Time every kernel of this machine on layers {(in, out): how many}, and compare its rows in several batches."""
    seconds: dict[str, float] = {}
    variant: set[str] = set()
    missing: set[str] = set()
    for (inputs, outputs), count in layers.items():
        width = min(outputs, max(1024, _ELEMENTS // inputs))
        weight, rows = _random(width, inputs, dtype=dtype), _random(max(_COMPARED), inputs, dtype=dtype)
        for name, pack in KERNELS[dtype].items():
            try:
                product = pack(weight, None)
                time_ = _time(product, rows)
            except RuntimeError:  # torch was built without this library, or the processor lacks the instructions
                missing.add(name)
                continue
            seconds[name] = seconds.get(name, 0.0) + count * outputs / width * time_
            if not _is_invariant(product, rows):
                variant.add(name)
    seconds = {name: time_ for name, time_ in seconds.items() if name not in missing}
    candidates = [name for name in seconds if name not in variant] or list(seconds)
    best = candidates[0]
    for name in candidates[1:]:
        if seconds[name] < _BETTER * seconds[best]:
            best = name
    flops = sum(2 * a * b * count for (a, b), count in layers.items()) * sum(_TIMED)
    gflops = {name: round(flops / time_ / 1e9, 1) for name, time_ in seconds.items()}
    return KernelChoice(best, str(dtype).removeprefix("torch."), gflops, tuple(sorted(variant)))


def _time(product: Product, rows: Tensor) -> float:
    """Seconds of one product with each number of rows in _TIMED: the least of several, which other load disturbs."""
    return sum(_time_call(lambda some=some: product(some)) for some in (rows[:count] for count in _TIMED))


def _time_call(call: Callable[[], object]) -> float:
    """Seconds of a call: the least of several."""
    call()
    best, spent, runs = float("inf"), 0.0, 0
    while runs < 3 or (runs < 20 and spent < 0.02):
        begun = time.perf_counter()
        call()
        took = time.perf_counter() - begun
        best, spent, runs = min(best, took), spent + took, runs + 1
    return best


def _is_invariant(product: Product, rows: Tensor) -> bool:
    expected = product(rows[: _COMPARED[0]])
    for count in _COMPARED:
        # The first rows among others, and at the end of a batch.
        first = product(rows[:count])[: len(expected)]
        last = product(rows[:count].roll(count - len(expected), 0))[count - len(expected) :]
        if not (torch.equal(first, expected) and torch.equal(last, expected)):
            return False
    return True


def _random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def computing_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """In what to compute where ``dtype`` is wanted: float32 for bfloat16 on a CPU without instructions for it, which is
    10 to 100 times as fast there and no less exact."""
    slow = dtype == torch.bfloat16 and device.type == "cpu" and not has_bf16()
    return torch.float32 if slow else dtype


@cache
def has_bf16() -> bool:
    """Whether this machine's CPU multiplies bfloat16 matrices at least half as fast as float32 ones. Kept in a file, as
    the choice of kernels is."""
    kept = _keep(_file((), torch.bfloat16), _measure_bf16)
    if kept.name != "bfloat16":
        log.warning("this processor has no fast bfloat16: %s", FLOAT32_INSTEAD)
    return kept.name == "bfloat16"


def _measure_bf16() -> KernelChoice:
    """The dtype that multiplies matrices of 256² fastest, bfloat16 up to twice the time of float32."""
    size, rates = 256, {}
    for dtype in (torch.float32, torch.bfloat16):
        a = _random(size, size, dtype=dtype)
        rates[str(dtype).removeprefix("torch.")] = round(2 * size**3 / _time_call(lambda a=a: a @ a) / 1e9, 1)
    name = "bfloat16" if rates["bfloat16"] >= 0.5 * rates["float32"] else "float32"
    return KernelChoice(name, "bfloat16", rates)


def _file(layers: tuple[tuple[Shape, int], ...], dtype: torch.dtype) -> Path:
    """In COALIGN_CACHE, or the user's cache directory."""
    base = os.environ.get("COALIGN_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "coalign")
    machine = (_processor(), torch.__version__, *(os.environ.get(name) for name in _ENVIRONMENT))
    key = hashlib.sha256(repr((machine, str(dtype), layers)).encode()).hexdigest()[:24]
    return Path(base).expanduser() / "kernels" / f"{key}.json"


@cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    keys = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")
    return "\n".join(sorted({line for line in lines if line.partition("\t")[0].strip() in keys}))


def _read(file: Path) -> KernelChoice | None:
    try:
        kept = json.loads(file.read_text())
        return KernelChoice(kept["name"], kept["dtype"], kept["gflops"], tuple(kept["variant"]))
    except (OSError, ValueError, KeyError):
        return None


def _keep(file: Path, make: Callable[[], KernelChoice]) -> KernelChoice:
    """The choice in the file; without one, make it and write it, unless another process was first: then that one's."""
    if (kept := _read(file)) is not None:
        return kept
    choice = make()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as out:
            json.dump(asdict(choice), out, indent=1)
        try:
            os.link(out.name, file)
        except FileExistsError:
            pass
        finally:
            os.unlink(out.name)
    except OSError as problem:
        log.warning(
            "the choice of kernels cannot be kept (%s): another process may choose others, which round differently; "
            "set COALIGN_CACHE to a directory that can be written",
            problem,
        )
        return choice
    return _read(file) or choice


class Linear(nn.Linear):
    """nn.Linear over 2D or 3D input that computes with a packed copy of its weight between ``pack`` and ``unpack``."""

    product: Product | None = None

    def forward(self, input: Tensor) -> Tensor:
        if self.product is None:
            return F.linear(input, self.weight, self.bias)
        rows = input.reshape(-1, self.in_features)
        return self.product(rows).view(*input.shape[:-1], self.out_features)

    def pack(self, kernel: KernelChoice) -> None:
        """Derive the packed weight from the current one; call again after the weight changed."""
        self.product = kernel.product(self.weight, self.bias)

    def unpack(self) -> None:
        self.product = None


def replace_linears(model: nn.Module) -> list[Linear]:
    """Put a Linear in the place of every nn.Linear of ``model``, around the same parameters; returns them."""
    replaced = []
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            linear = Linear(module.in_features, module.out_features, module.bias is not None, device="meta")
            linear.weight, linear.bias = module.weight, module.bias
            model.set_submodule(name, linear)
            replaced.append(linear)
    return replaced
