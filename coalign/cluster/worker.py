"""Runs one Module in its process (or thread): executes calls, and answers each with a Meta and a payload.

The same class serves the local cluster and Ray. Exceptions do not leave it; they become a WorkerFailure. The worker
also traces calls for a profiler.
"""

from __future__ import annotations

import inspect
import pickle
import resource
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from coalign import devices
from coalign.cluster.batch_ref import DeviceMemoryUse, Meta, Store, WorkerFailure, WorkerRows
from coalign.config.functions import resolve_class
from coalign.config.schema import ModelConfig, ProfileConfig
from coalign.data.batch import Batch
from coalign.hub import fetch_model
from coalign.memory import PARTS, Arena
from coalign.processes.host import count_processors
from coalign.roles import Context
from coalign.types import Metric, Stats

if TYPE_CHECKING:
    from coalign.backends.base import Module


class _Tracer:
    """Traces the calls of a worker with torch's profiler or nsys, where each call is a range. One trace at a time."""

    def __init__(self) -> None:
        self._tool = ""  # empty unless a trace runs
        self._profile: torch.profiler.profile | None = None

    def start(self, config: ProfileConfig, step: int) -> None:
        """Start the trace of a step. ValueError for `nsys` without CUDA."""
        if config.tool == "nsys":
            if not devices.start_cuda_capture(f"step {step}"):
                raise ValueError(
                    "runtime.profile.tool: `nsys` shows CUDA devices, and this process has none; use `torch`"
                )
        else:
            self._profile = torch.profiler.profile(
                profile_memory=config.memory, with_stack=config.stacks, record_shapes=config.shapes
            )
            self._profile.start()
        self._tool = config.tool

    def stop(self, file: Path) -> None:
        """End the trace; torch's is written to ``file`` (Chrome trace format; Perfetto opens it)."""
        tool, self._tool = self._tool, ""
        if tool == "nsys":
            devices.stop_cuda_capture()
        elif self._profile is not None:
            self._profile.stop()
            file.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(file))
            self._profile = None

    def range(self, name: str) -> AbstractContextManager[object]:
        """A context that the trace shows under this name."""
        # There is no public function for it.
        if torch.autograd._profiler_enabled():  # pyright: ignore[reportPrivateImportUsage]
            return torch.profiler.record_function(name)
        return devices.mark_cuda_range(name) if self._tool else nullcontext()


Answer = tuple[Meta, Batch | None]
LOADING = ("setup", "set_up_again")  # verbs with a ModelConfig and a Context


def find_module_class(config: ModelConfig) -> type[Module]:
    """The Module subclass that a configuration names (`fsdp`, or a dotted path).

    A model with a cache, or a reward model or teacher with a chat template, gets the module that wraps it.
    """
    return resolve_class(find_wrapper(config) or config.module, "coalign.backends")


def find_wrapper(config: ModelConfig) -> str | None:
    """Return the module that the settings of a model put around the one that they name; None for none."""
    if config.cache:
        return "cached"
    if config.chat_template and config.head == "reward":
        return "retokenize"
    if config.chat_template and config.head == "lm" and config.frozen and config.judge is None:
        return "cross_tokenizer"
    return None


class Worker:
    """Executes verbs on its module: ``setup``, ``set_up_again``, ``call`` (a method), ``first_part`` and ``next_part``
    (chunks of a method's result), ``run`` (a function), ``move``, ``start_trace``, ``stop_trace``, ``close``; ``apply``
    and ``transform`` call pure functions without a module.

    With an ``arena``, every answer reports what the module has on its device.
    """

    def __init__(self, store: Store, threads: int | None, arena: Arena | None = None) -> None:
        self.store = store
        self.threads = threads or count_processors()
        self.arena = arena
        self._module: Module | None = None
        self.context = Context()
        self.tracer = _Tracer()
        self._chunks: Iterator[Any] = iter(())  # results still to come, of the call that `first_part` started

    @property
    def module(self) -> Module:
        """The module; a worker of pure functions has none."""
        assert self._module is not None, "a worker of pure functions has no module"
        return self._module

    def execute(self, verb: str, *arguments: Any) -> Answer:
        """Run one verb; returns its result, with its time and memory. Never raises: a failure is part of the Meta."""
        clock, start = time.time(), time.perf_counter()
        # The number of threads is set per calling thread, and its default differs between threads, processes and Ray
        # actors. It decides the order of summation, so results would differ.
        torch.set_num_threads(self.threads)
        baseline = self._reset_peak()
        try:
            # A library that copies by itself, such as torch's checkpoints, waits for the current device alone.
            with devices.use_device(arguments[1].device if verb in LOADING else self.context.device):
                meta, payload = getattr(self, verb)(*arguments)
            use = self._measure_use(baseline)
        except BaseException as error:
            return Meta(failure=self._describe_failure(error)), None
        seconds = time.perf_counter() - start
        memory = self._peak_memory()
        return replace(meta, use=use, verb=verb, start=clock, seconds=seconds, memory=memory), payload

    def setup(self, config: ModelConfig, context: Context) -> Answer:
        """Build the module and let it load, once this machine has its model."""
        self.context = context
        fetch_model(config)
        self._module = find_module_class(config)(config, context)
        if self.arena is not None:
            self._module.arena = self.arena
        self._module.setup()
        return Meta(), None

    def set_up_again(self, config: ModelConfig, context: Context) -> Answer:
        """Forget the calls of a previous driver; keep the module with its weights.

        A module without weights (reward functions) is built anew: the files that it reads may have changed.
        """
        module = self._module
        if module is None or not module.exclusive:
            if module is not None:
                module.close()
            return self.setup(config, context)
        self._chunks = iter(())
        module.links.clear()
        with suppress(Exception):  # nobody wants the checkpoint that was being written
            module.finish_saves()
        module.forget_calls()
        return Meta(), None

    def ping(self) -> Answer:
        """Answer that the worker lives, and that it has finished all earlier verbs."""
        return Meta(), None

    def call(self, method: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Answer:
        """Call a method of the module; WorkerRows among the arguments become Batches."""
        arguments, keywords = self._receive(method, arguments, keywords)
        with self.tracer.range(f"{self.context.model}.{method}"):
            result = getattr(self.module, method)(*arguments, **keywords)
        base = next((value for value in (*arguments, *keywords.values()) if isinstance(value, Batch)), None)
        return _answer(result, base)

    def first_part(self, method: str, chunks: int, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Answer:
        """Start a call whose result comes in ``chunks``, by the module's `<method>_in_parts`; returns the first one."""
        self._chunks = self._iterate_chunks(method, chunks, arguments, keywords)
        return self.next_part(method)

    def next_part(self, method: str) -> Answer:
        """The next chunk of the call that was started; if one has failed, all later ones fail, too."""
        try:
            with self.tracer.range(f"{self.context.model}.{method}"):
                return _answer(next(self._chunks), None)
        except BaseException as error:
            self._chunks = map(_raise, repeat(error))
            raise

    def roll(self, new: Sequence[tuple[int, WorkerRows, Mapping[str, Any]]], seconds: float) -> Answer:
        """Let the policy take ``new`` rows, each with a number and options, and generate for at most ``seconds``.

        The batch is that of one number whose samples are complete, if there is one; the value is this number (or None)
        and how many samples wait for a place in the generator's batch.
        """
        self._receive("roll", (), {})
        prompts = [(number, rows.gather(self.store), options) for number, rows, options in new]
        with self.tracer.range(f"{self.context.model}.roll"):
            number, batch, stats, queued = cast(Any, self.module).roll(prompts, seconds)
        meta = Meta() if batch is None else Meta.of(batch, stats)
        return replace(meta, value=(number, queued)), batch

    def _iterate_chunks(
        self, method: str, chunks: int, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> Iterator[Any]:
        generate = getattr(self.module, f"{method}_in_parts", None)
        if generate is None:
            raise ValueError(
                f"models.{self.context.model}.parts_per_call: `{self.module.config.module}` hands over everything at "
                "once; set it to 1"
            )
        arguments, keywords = self._receive(method, arguments, keywords)
        yield from generate(chunks, *arguments, **keywords)

    def _receive(
        self, method: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call as the module takes them. RuntimeError if it cannot be called now."""
        self.module.check_fit()
        if self.arena is not None:
            needs = self.module.needs.get(method, PARTS)
            self.arena.require(self.context.model, needs, f"{self.context.model}.{method}")

        def fetch(value: Any) -> Any:
            return value.gather(self.store) if isinstance(value, WorkerRows) else value

        return tuple([fetch(value) for value in arguments]), {name: fetch(value) for name, value in keywords.items()}

    def run(self, function: Callable[..., Any], *arguments: Any) -> Answer:
        """Call ``function(module, store, *arguments)``, which works on the module itself, such as on its weights."""
        with self.tracer.range(f"{self.context.model}.{function.__name__}"):
            return Meta(value=function(self.module, self.store, *arguments)), None

    def apply(self, function: Callable[..., Any], rows: WorkerRows, keywords: Mapping[str, Any]) -> Answer:
        """Call a pure function on columns of a batch, a sequence for each episode; returns the columns that it adds."""
        batch = rows.gather(self.store)
        columns, stats = apply_columns(function, batch.as_episodes(), keywords)
        return _answer({**batch.spread(columns), **stats}, batch)

    def transform(self, function: Callable[..., Any], inputs: list[WorkerRows], keywords: Mapping[str, Any]) -> Answer:
        """Call a pure function on complete batches; returns the batch that it makes."""
        batch, stats = transform_batches(function, [rows.gather(self.store) for rows in inputs], keywords)
        return Meta.of(batch, stats), batch

    def move(self, to: str, components: Sequence[str], limit: int | None) -> Answer:
        """Move components of the module to the ``host`` or the ``device``; returns the bytes that moved.

        ``limit``: bytes that this process may use on its device from now on (None: as before).
        """
        if limit is not None and self.arena is not None:
            self.arena.limit = limit
        if not components:
            return Meta(value=0), None
        baseline = self._measure_bytes()
        self.module.move(to, components)
        return Meta(value=abs(self._measure_bytes() - baseline)), None

    def start_trace(self, config: ProfileConfig, step: int) -> Answer:
        """Start to trace this worker."""
        self.tracer.start(config, step)
        return Meta(), None

    def stop_trace(self, directory: str) -> Answer:
        """End the trace, and write it to a file in ``directory``."""
        self.tracer.stop(Path(directory) / f"{self.context.process}.json.gz")
        return Meta(), None

    def close(self) -> Answer:
        """Let the module release its resources."""
        if self._module is not None:
            self._module.close()
        return Meta(), None

    def _describe_failure(self, error: BaseException) -> WorkerFailure:
        output, trace = self.context.output, "".join(traceback.format_exception(error))
        from coalign.cluster.memory_report import write_memory_report  # for failures alone

        more = write_memory_report(error, Path(output) / "out_of_memory", self.context.process) if output else ""
        return WorkerFailure(type(error).__name__, f"{error}{more}", trace, _portable(error))

    def _reset_peak(self) -> int:
        """Start to measure the device's peak; returns the bytes in use."""
        if self.arena is None:
            return 0
        if devices.is_accelerator(self.arena.device):
            torch.accelerator.reset_peak_memory_stats(self.arena.device)
            return torch.accelerator.memory_allocated(self.arena.device)
        return self.arena.begin()

    def _measure_use(self, baseline: int) -> DeviceMemoryUse | None:
        if self.arena is None or self._module is None:
            return None
        current = {self.context.model: self.module.measure_memory()}
        models = self.arena.models()
        on_device = {model: self.arena.list_resident(model) for model in models} | current
        peak = self.arena.peak
        if devices.is_accelerator(self.arena.device):
            peak = torch.accelerator.max_memory_allocated(self.arena.device)
        peak = max(peak, sum(size for components in on_device.values() for size in components.values()))
        return DeviceMemoryUse(on_device, {model: self.arena.list_offloaded(model) for model in models}, baseline, peak)

    def _measure_bytes(self) -> int:
        """Bytes of all models on the device."""
        use = self._measure_use(0)
        return sum(size for components in use.on_device.values() for size in components.values()) if use else 0

    def _peak_memory(self) -> int:
        # A module that computes elsewhere may be placed on devices that this torch cannot reach.
        device = self.context.device
        if self._module is not None and devices.is_accelerator(device) and torch.accelerator.is_available():
            return torch.accelerator.max_memory_allocated(device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _answer(result: Any, base: Batch | None) -> Answer:
    """Sort a result: a Batch, or columns for the rows of ``base``, is the payload; metrics and plain values are in the
    Meta."""
    if isinstance(result, Batch):
        return Meta.of(result), result
    if isinstance(result, tuple) and isinstance(result[0], Batch):
        return Meta.of(*result), result[0]
    columns, stats, plain = _sort_result(result) if isinstance(result, Mapping) else ({}, {}, {"": result})
    if plain or (columns and base is None):
        return Meta(value=result), None
    if not columns or base is None:
        return Meta(stats=stats), None
    batch = Batch(base.lengths).with_(**columns)
    return Meta.of(batch, stats), batch


def _raise(error: BaseException) -> None:
    raise error


def _portable(error: BaseException) -> BaseException | None:
    """The exception if it can be pickled, None if not."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return None


DERIVED = ("segment", "lengths")  # columns that every batch has


def apply_columns(
    function: Callable[..., Any], batch: Batch, keywords: Mapping[str, Any]
) -> tuple[dict[str, Any], Stats]:
    """Call ``function`` on columns of a batch; returns its columns and its metrics.

    The function returns a mapping: tensors and lists are columns, values of the metrics' types are metrics. Raises
    ValueError for a missing column and for a result of another type.
    """
    result = function(*bind_columns(function, batch), **keywords)
    if not isinstance(result, Mapping):
        raise ValueError(
            f"{name_of(function)} returned a {type(result).__name__}; expected a dict of columns and metrics"
        )
    columns, metrics, unknown = _sort_result(result)
    if unknown:
        raise ValueError(
            f"{name_of(function)} returned {', '.join(f'{k!r} of type {type(v).__name__}' for k, v in unknown.items())}"
            "; expected tensors or lists (columns) and Stat, Max, Total, Moments or EffectiveSize (metrics)"
        )
    return columns, metrics


def transform_batches(
    function: Callable[..., Any], batches: Sequence[Batch], keywords: Mapping[str, Any]
) -> tuple[Batch, Stats]:
    """Call ``function`` on batches; it returns a batch, or a batch and metrics. ValueError for anything else."""
    result = function(*batches, **keywords)
    batch, stats = result if isinstance(result, tuple) else (result, {})
    if not isinstance(batch, Batch):
        raise ValueError(f"{name_of(function)} returned a {type(batch).__name__}; expected a Batch")
    return batch, stats


def bind_columns(function: Callable[..., Any], batch: Batch) -> list[Any]:
    """The columns that the function's positional parameters name; a column with a default may be missing."""
    there = {*batch.token, *batch.sequence, *DERIVED}
    columns = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            continue
        if name not in there and parameter.default is parameter.empty:
            raise ValueError(
                f"{name_of(function)} needs the column '{name}', which nobody produced; "
                f"there are: {', '.join(sorted(there.difference(DERIVED)))}"
            )
        columns.append(batch[name] if name in there else parameter.default)
    return columns


def _sort_result(result: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Metric], dict[str, Any]]:
    """Sort the values of a result into (columns, metrics, everything else)."""
    columns = {k: v for k, v in result.items() if isinstance(v, Tensor | list)}
    metrics = {k: v for k, v in result.items() if isinstance(v, Metric)}
    rest = {k: v for k, v in result.items() if k not in columns and k not in metrics}
    return columns, metrics, rest


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function in messages and metrics."""
    return getattr(function, "__name__", type(function).__name__)
