"""One worker: holds one Module in its process (or thread), executes calls, and answers (Meta, payload).

Plain Python: the same class serves the local cluster and Ray. Exceptions do not leave it; they become a WorkerFailure.

What one worker does, for a profiler: torch's own, or ranges that nsys shows.

What was in memory when there was not enough of it.
"""

from __future__ import annotations

import gc
import os
import pickle
import resource
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from coalign.cluster.functions import apply_columns, sort_result, transform_batches
from coalign.cluster.future import DeviceMemoryUse, Meta, Store, WorkerFailure, WorkerRows
from coalign.config.functions import resolve_class
from coalign.config.schema import ModelConfig, ProfileConfig
from coalign.data.batch import Batch
from coalign.memory.arena import PARTS, Arena
from coalign.roles import Context

if TYPE_CHECKING:
    from coalign.backends.base import Module


class Tracer:
    """At most one trace at a time. The calls of the worker are ranges in it (`train_step`)."""

    def __init__(self) -> None:
        self._tool = ""  # of the trace under way
        self._profile: torch.profiler.profile | None = None

    def start(self, config: ProfileConfig, step: int) -> None:
        """Begin the trace of a step. torch traces one process once at a time. ValueError for `nsys` without CUDA."""
        if config.tool == "nsys":
            if not torch.cuda.is_available():
                raise ValueError(
                    "runtime.profile.tool: `nsys` shows CUDA devices, and this process has none; use `torch`"
                )
            torch.cuda.profiler.start()  # `nsys profile --capture-range=cudaProfilerApi` begins here
            torch.cuda.nvtx.range_push(f"step {step}")
        else:
            self._profile = torch.profiler.profile(
                profile_memory=config.memory, with_stack=config.stacks, record_shapes=config.shapes
            )
            self._profile.start()
        self._tool = config.tool

    def stop(self, file: Path) -> None:
        """End the trace; that of torch goes to ``file`` (Chrome trace format; Perfetto opens it)."""
        tool, self._tool = self._tool, ""
        if tool == "nsys":
            torch.cuda.nvtx.range_pop()
            torch.cuda.profiler.stop()
        elif self._profile is not None:
            self._profile.stop()
            file.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(file))
            self._profile = None

    def range(self, name: str) -> AbstractContextManager[object]:
        """What happens inside is shown under this name."""
        # There is no public name for it.
        if torch.autograd._profiler_enabled():  # pyright: ignore[reportPrivateImportUsage]
            return torch.profiler.record_function(name)
        return torch.cuda.nvtx.range(name) if self._tool else nullcontext()


_ROWS = 40


def write_memory_report(error: BaseException, folder: Path, name: str) -> str:
    """Write ``folder/name.txt``, a table of the largest tensors, and on CUDA name.pickle, the allocator's snapshot (for
    pytorch.org/memory_viz). Returns what to add to the error's message; empty for any other error."""
    if not _out_of_memory(error):
        return ""
    table, snapshot = folder / f"{name}.txt", folder / f"{name}.pickle"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        table.write_text(list_largest_tensors())
        if torch.cuda.is_initialized():
            torch.cuda.memory._dump_snapshot(str(snapshot))
    except OSError as problem:  # the error of the run is the other one
        return f"\nwhat was in memory could not be written: {problem}"
    where = f"; the allocator's memory is in {snapshot}" if torch.cuda.is_initialized() else ""
    return f"\nthe largest tensors are listed in {table}{where}"


def list_largest_tensors() -> str:
    """The tensors that Python can see, by the memory that they hold: MiB, dtype, shape, device. Views of the same
    memory are one row; what only autograd holds is not among them."""
    found: dict[int, Tensor] = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, Parameter) and not thing.is_meta and thing.layout == torch.strided:
            found.setdefault(thing.untyped_storage().data_ptr(), thing)
    tensors = sorted(found.values(), key=lambda tensor: -tensor.untyped_storage().nbytes())
    total = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    lines = [f"{total / 2**20:10.1f} MiB in {len(tensors)} tensors"]
    for tensor in tensors[:_ROWS]:
        size, dtype = tensor.untyped_storage().nbytes() / 2**20, str(tensor.dtype).removeprefix("torch.")
        kind = "parameter" if isinstance(tensor, Parameter) else "gradient graph" if tensor.grad_fn else ""
        lines.append(f"{size:10.1f} {dtype:<10} {list(tensor.shape)!s:<24} {tensor.device} {kind}".rstrip())
    return "\n".join(lines) + "\n"


def _out_of_memory(error: BaseException) -> bool:
    # The CPU's allocator raises a plain RuntimeError.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


Answer = tuple[Meta, Batch | None]


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def find_module_class(config: ModelConfig) -> type[Module]:
    """The Module subclass that a configuration names (`fsdp`, or a dotted path), or the one that stands before it: with
    a cache, and for a reward model with a template to read by."""
    reads_text = config.head == "reward" and config.chat_template
    name = "cached" if config.cache else "retokenize" if reads_text else config.module
    return resolve_class(name, "coalign.backends")


class Worker:
    """The verbs: ``setup``, ``call`` (a method of the module), ``first_part`` and ``next_part`` of one, ``run`` (a
    function on it), ``apply``, ``transform``, ``move``, ``start_trace``, ``stop_trace``, ``close``.

    With an ``arena``, every answer says what the module has on its device.
    """

    def __init__(self, store: Store, threads: int | None, arena: Arena | None = None) -> None:
        self.store = store
        self.threads = threads
        self.arena = arena
        self._module: Module | None = None
        self.context = Context()
        self.tracer = Tracer()
        self._parts: Iterator[Any] = iter(())  # of a call that hands them over as they come

    @property
    def module(self) -> Module:
        """The module that ``setup`` has made."""
        assert self._module is not None, "a worker of pure functions has no module"
        return self._module

    def execute(self, verb: str, *arguments: Any) -> Answer:
        """Run one verb; its result and what it took. Never raises: a failure is part of the Meta."""
        clock, start = time.time(), time.perf_counter()
        # Thread counts belong to the calling thread, and their defaults differ between threads, processes and Ray
        # actors; with them differs the order of summation.
        torch.set_num_threads(self.threads or cores())
        before = self._begin()
        try:
            meta, payload = getattr(self, verb)(*arguments)
            meta = replace(meta, use=self._use(before))
        except BaseException as error:
            return Meta(failure=_failure(error, self._memory_report(error))), None
        seconds = time.perf_counter() - start
        return replace(meta, verb=verb, start=clock, seconds=seconds, memory=self._peak_memory()), payload

    def setup(self, config: ModelConfig, context: Context) -> Answer:
        """Build the module and let it load."""
        self.context = context
        self._module = find_module_class(config)(config, context)
        if self.arena is not None:
            self._module.arena = self.arena
        self._module.setup()
        return Meta(), None

    def call(self, method: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Answer:
        """Call a method of the module; Shares among the arguments arrive as Batches. RuntimeError if it is unfit."""
        arguments, keywords = self._given(method, arguments, keywords)
        with self.tracer.range(f"{self.context.model}.{method}"):
            result = getattr(self.module, method)(*arguments, **keywords)
        base = next((value for value in (*arguments, *keywords.values()) if isinstance(value, Batch)), None)
        return _answer(result, base)

    def first_part(self, method: str, parts: int, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Answer:
        """The first of so many ``parts`` of what a call gives, by the module's `<method>_in_parts`."""
        self._parts = self._in_parts(method, parts, arguments, keywords)
        return self.next_part(method)

    def next_part(self, method: str) -> Answer:
        """The next one of a call that is under way; if a part has failed, so do all after it."""
        try:
            with self.tracer.range(f"{self.context.model}.{method}"):
                return _answer(next(self._parts), None)
        except BaseException as error:
            self._parts = map(_raise, repeat(error))
            raise

    def _in_parts(
        self, method: str, parts: int, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> Iterator[Any]:
        in_parts = getattr(self.module, f"{method}_in_parts", None)
        if in_parts is None:
            raise ValueError(
                f"models.{self.context.model}.parts_per_call: `{self.module.config.module}` hands over everything at "
                "once; set it to 1"
            )
        arguments, keywords = self._given(method, arguments, keywords)
        yield from in_parts(parts, *arguments, **keywords)

    def _given(
        self, method: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call that may begin."""
        self.module.check_fit()
        if self.arena is not None:
            needs = self.module.needs.get(method, PARTS)
            self.arena.require(self.context.model, needs, f"{self.context.model}.{method}")
        received = tuple(self._receive(value) for value in arguments)
        return received, {name: self._receive(value) for name, value in keywords.items()}

    def run(self, function: Callable[..., Any], *arguments: Any) -> Answer:
        """``function(module, store, *arguments)``: work on the module itself, such as moving its weights."""
        with self.tracer.range(f"{self.context.model}.{function.__name__}"):
            return Meta(value=function(self.module, self.store, *arguments)), None

    def apply(self, function: Callable[..., Any], given: WorkerRows, keywords: Mapping[str, Any]) -> Answer:
        """A pure function on columns (coalign.cluster.functions); its own columns alone, no batch if it returns none."""
        batch = given.gather(self.store)
        columns, stats = apply_columns(function, batch, keywords)
        return _answer({**columns, **stats}, batch)

    def transform(self, function: Callable[..., Any], inputs: list[WorkerRows], keywords: Mapping[str, Any]) -> Answer:
        """A pure function from whole batches to another one; see coalign.cluster.functions."""
        batch, stats = transform_batches(function, [share.gather(self.store) for share in inputs], keywords)
        return Meta.of(batch, stats), batch

    def move(self, to: str, parts: Sequence[str], limit: int | None) -> Answer:
        """Take parts of the module to the ``host`` or the ``device``; the bytes that moved. ``limit``: bytes that this
        process may have on its device from now on (None: as before)."""
        if limit is not None and self.arena is not None:
            self.arena.limit = limit
        if not parts:
            return Meta(value=0), None
        before = self._held()
        self.module.move(to, parts)
        return Meta(value=abs(self._held() - before)), None

    def start_trace(self, config: ProfileConfig, step: int) -> Answer:
        """Trace what this worker does from now on."""
        self.tracer.start(config, step)
        return Meta(), None

    def stop_trace(self, directory: str) -> Answer:
        """End the trace, in a file of ``directory``."""
        self.tracer.stop(Path(directory) / f"{self.context.process}.json.gz")
        return Meta(), None

    def close(self) -> Answer:
        """Let the module give back what it took."""
        if self._module is not None:
            self._module.close()
        return Meta(), None

    def _receive(self, value: Any) -> Any:
        return value.gather(self.store) if isinstance(value, WorkerRows) else value

    def _memory_report(self, error: BaseException) -> str:
        output = self.context.output
        return write_memory_report(error, Path(output) / "out_of_memory", self.context.process) if output else ""

    def _begin(self) -> int:
        """Measure the device's peak from now on; the bytes in use."""
        if self.arena is None:
            return 0
        if self.arena.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.arena.device)
            return torch.cuda.memory_allocated(self.arena.device)
        return self.arena.begin()

    def _use(self, before: int) -> DeviceMemoryUse | None:
        if self.arena is None or self._module is None:
            return None
        own = {self.context.model: self.module.measure_memory()}
        models = self.arena.models()
        held = {model: self.arena.held(model) for model in models} | own
        cuda = self.arena.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self.arena.device) if cuda else self.arena.peak
        peak = max(peak, sum(size for parts in held.values() for size in parts.values()))
        return DeviceMemoryUse(held, {model: self.arena.away(model) for model in models}, before, peak)

    def _held(self) -> int:
        """Bytes of everything that is known on the device."""
        use = self._use(0)
        return sum(size for parts in use.on_device.values() for size in parts.values()) if use else 0

    def _peak_memory(self) -> int:
        if self._module is not None and self.module.context.device.startswith("cuda"):
            return torch.cuda.max_memory_allocated(self.module.context.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _answer(result: Any, base: Batch | None) -> Answer:
    """A Batch (or a Batch and its statistics), or columns for the rows of ``base``, as payload; statistics and plain
    values in the Meta."""
    if isinstance(result, Batch):
        return Meta.of(result), result
    if isinstance(result, tuple) and isinstance(result[0], Batch):
        return Meta.of(*result), result[0]
    columns, stats, others = sort_result(result) if isinstance(result, Mapping) else ({}, {}, {"": result})
    if others or (columns and base is None):
        return Meta(value=result), None
    if not columns or base is None:
        return Meta(stats=stats), None
    batch = Batch(base.lengths).with_(**columns)
    return Meta.of(batch, stats), batch


def _failure(error: BaseException, more: str) -> WorkerFailure:
    trace = "".join(traceback.format_exception(error))
    return WorkerFailure(type(error).__name__, f"{error}{more}", trace, _portable(error))


def _raise(error: BaseException) -> None:
    raise error


def _portable(error: BaseException) -> BaseException | None:
    """The exception if it survives a trip between processes, None for those that hold what cannot travel."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return None
