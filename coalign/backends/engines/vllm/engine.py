"""vLLM as a generation engine: its scheduler and kernels, stepped by Coalign in this process.

Everything here goes through vLLM's own doors: engine arguments, a logits processor, a worker extension, collective
calls. What a token will be depends on the weights and on (seed, group, index, position), and on the batch only as far
as vLLM's kernels round in another order for another batch (about 1e-6 of a logit in float32).

`models.<name>.vllm`: which of vLLM's engine arguments a user may set, and what Coalign sets itself.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from textwrap import shorten
from typing import Any

import numpy as np
import torch
import vllm
from torch import Tensor
from vllm import EngineArgs, RequestOutput
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.engine.llm_engine import LLMEngine

from coalign.backends.engines.contract import InferenceEngine, OnToken
from coalign.backends.engines.request import Decoder
from coalign.backends.engines.sampling import Sampling
from coalign.backends.engines.vllm import adapters
from coalign.backends.engines.vllm.processes import WorkerProcesses
from coalign.backends.engines.vllm.run import CounterSampler, VLLMRun
from coalign.backends.engines.vllm.worker import WeightLoader, WeightOutlet
from coalign.config.errors import suggest

OWNED = {
    "model": "it is `load`",
    "model_weights": "weights come from `load` and from the trainer",
    "tokenizer": "it is `tokenizer`; vLLM reads and writes token ids",
    "skip_tokenizer_init": "vLLM reads and writes token ids",
    "trust_remote_code": "it is `trust_remote_code`",
    "dtype": "it is `compute_dtype`, or `dtype`",
    "seed": "random numbers follow from the run's `seed`, group, index and position",
    "tensor_parallel_size": "it is `tensor_parallel`",
    "pipeline_parallel_size": "it is `pipeline_parallel`",
    "data_parallel_size": "replicas follow from `num_process`, or from `num_gpu`",
    "distributed_executor_backend": "it follows from `tensor_parallel` and `pipeline_parallel`",
    "load_format": "weights come from `load` and from the trainer",
    "logits_processors": "Coalign draws the tokens in one",
    "logprobs_mode": "Coalign reports log-probs as all of its engines do",
    "speculative_config": "Coalign draws the tokens, and vLLM does not let it where it guesses some",
    "async_scheduling": "weights are taken and samples cut between two steps",
    "worker_extension_cls": "Coalign loads weights with one",
    "weight_transfer_config": "weights come by `sync`",
    "generation_config": "it is `sampling`",
    "runner": "it generates",
    "disable_log_stats": "Coalign has statistics of its own",
    "enable_lora": "it follows from `sync.adapters`",
    "max_lora_rank": "it is `lora.rank` of the trainer",
    "max_loras": "there is one adapter, the trainer's",
    "enable_sleep_mode": "it follows from `offload`",
}


def check_owned(options: Iterable[str], model: str) -> None:
    """Raises ValueError for an option that is Coalign's."""
    if owned := [name for name in options if name in OWNED]:
        raise ValueError(f"models.{model}.vllm.{owned[0]} is set by Coalign: {OWNED[owned[0]]}")


def check_known(options: Iterable[str], known: Iterable[str], model: str) -> None:
    """Raises ValueError for an option that vLLM does not have. ``known``: those that it has."""
    if unknown := [name for name in options if name not in known]:
        close = suggest(unknown[0], sorted(each for each in known if each not in OWNED))
        raise ValueError(f"models.{model}.vllm.{unknown[0]} is no engine argument of vLLM{close}")


CPU = {"enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 2**30}  # compiling takes minutes there
REASON = 400  # characters of what vLLM says: it lists all models that it knows
LOAD_SECONDS = 600.0  # that a worker may take for one parcel of weights


class VLLMEngine(InferenceEngine):
    """Generates as ``arguments`` of vLLM say, on as many devices.

    shapes: the weights that there are, by their Hugging Face names. decoder: see coalign.backends.engines.request.
    adapter_rank: of the adapters that come with the weights, each time all of them; None: none do.
    Raises ValueError for an architecture that vLLM cannot run.
    """

    def __init__(
        self,
        arguments: EngineArgs,
        shapes: Mapping[str, torch.Size],
        *,
        model: str,
        seed: int,
        end_tokens: Iterable[int],
        decoder: Decoder,
        adapter_rank: int | None,
    ) -> None:
        super().__init__()
        self.seed = seed
        self.end_tokens = frozenset(end_tokens)
        self.decoder = decoder
        self.shapes = shapes
        self.adapter_rank = adapter_rank
        self.loads = 0  # of weights, so far
        self.pipelined = arguments.pipeline_parallel_size > 1
        self.remote = arguments.tensor_parallel_size * arguments.pipeline_parallel_size > 1
        with _process_as_it_was(), _naming_the_model(arguments, model):
            self.llm = LLMEngine.from_vllm_config(_config(arguments), disable_log_stats=True)
        self._workers = (
            WorkerProcesses(self.llm.engine_core.engine_core.model_executor.workers) if self.remote else None
        )
        config = self.llm.vllm_config
        self.eager = config.model_config.enforce_eager
        self.context = config.model_config.max_model_len
        self.vocabulary = config.model_config.get_vocab_size()
        self._names = map(str, itertools.count())
        [self._fused, *_] = self.llm.collective_rpc("coalign_setup", args=(self.remote and self.eager,))
        self._outlet = WeightOutlet()

    @property
    def lora_request(self) -> LoRARequest | None:
        """What tells vLLM to add what the adapters compute."""
        return adapters.REQUEST if self.adapter_rank else None

    @property
    def weights_dtype(self) -> torch.dtype | None:
        kinds = set(self.llm.collective_rpc("coalign_dtype"))
        return kinds.pop() if len(kinds) == 1 else None

    def new_name(self) -> str:
        """Of a request."""
        return next(self._names)

    def step(self) -> list[RequestOutput]:
        """One step of vLLM. What is eager stays so: its sampler has a function that it compiles even then, for a minute
        on a CPU."""
        with torch.compiler.set_stance("force_eager" if self.eager else "default"), self._naming_who_is_lost():
            return self.llm.step()

    def sleep(self) -> None:
        """Weights to the host's memory; keys and values are forgotten. Only with ``enable_sleep_mode``."""
        self.llm.sleep(level=1, mode="keep")

    def wake(self, parts: Sequence[str]) -> None:
        """The device's memory back for these of ``weights`` and ``kv``."""
        self.llm.wake_up([{"weights": "weights", "kv": "kv_cache"}[part] for part in parts])

    def close(self) -> None:
        self.llm.engine_core.shutdown()

    @contextmanager
    def _run(self, sampling: Sampling, on_token: OnToken | None) -> Iterator[VLLMRun]:
        run = VLLMRun(self, sampling, on_token)
        try:
            yield run
        finally:
            run.close()

    def _load(self, weights: Iterable[tuple[str, Tensor]], *, adopt: bool) -> None:
        """vLLM always copies: it packs weights in its own way."""
        self.loads += 1
        if self.pipelined and self._running is not None:
            raise RuntimeError(
                "weights cannot change while a pipeline computes (pipeline_parallel): wait for `generate`"
            )
        taken: set[str] = set()
        with self._naming_who_is_lost():
            self._send(self._checked(weights, taken))
        self._check_complete(taken)

    def _send(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        whole = False
        call = self.llm.collective_rpc
        call("coalign_begin")
        try:
            if self.remote:
                for parcel in self._outlet.parcels(weights):
                    call("coalign_unpack", timeout=LOAD_SECONDS, args=(parcel,))
            else:
                call("coalign_take", args=(weights,))
            whole = True
        finally:
            call("coalign_end", timeout=LOAD_SECONDS, args=(whole,))

    @contextmanager
    def _naming_who_is_lost(self) -> Iterator[None]:
        """vLLM only says that what it waited for was cancelled."""
        try:
            yield
        except RuntimeError as problem:
            if self._workers is not None and (lost := self._workers.lost):
                raise RuntimeError(lost) from problem
            raise

    def _checked(self, weights: Iterable[tuple[str, Tensor]], taken: set[str]) -> Iterator[tuple[str, Tensor]]:
        """The weights and adapters, as far as they fit; the names of weights are added to ``taken``."""
        parts: dict[str, torch.Size] = {}
        for name, tensor in weights:
            if self.adapter_rank and adapters.adapted_weight(name):
                parts[name] = tensor.shape
                yield name, tensor.detach()
                continue
            shape = self.shapes.get(name)
            if shape is None:
                raise ValueError(f"the weights do not fit: '{name}' is no weight of the model")
            if tensor.shape != shape:
                raise ValueError(f"weight '{name}' has shape {list(tensor.shape)}; the model needs {list(shape)}")
            taken.add(name)
            yield name, tensor.detach()
        adapters.check(parts, self.shapes, self.adapter_rank or 0)

    def _check_complete(self, taken: set[str]) -> None:
        """Raises ValueError if weights are missing: any the first time; later those of a layer that vLLM computes as
        one (queries, keys and values) and that was given in part, so that the rest of it is lost."""
        needed = set(self.shapes) if self.version < 0 else {sibling for name in taken for sibling in self._with(name)}
        if missing := sorted(needed - taken):
            why = "" if self.version < 0 else "; vLLM computes them as one layer with others that came"
            raise ValueError(f"the weights do not fit: missing {missing[:5]}{' …' * (len(missing) > 5)}{why}")

    def _with(self, name: str) -> list[str]:
        """The weights that are loaded together with this one."""
        path, _, leaf = name.rpartition(".")
        owner, _, layer = path.rpartition(".")
        fused = next((parts for parts in self._fused.values() if layer in parts and len(parts) > 1), [layer])
        return [each for part in fused if (each := f"{owner}.{part}.{leaf}") in self.shapes]


def engine_arguments(
    directory: str,
    *,
    model: str,
    dtype: torch.dtype,
    device: str,
    tensor_parallel: int,
    pipeline_parallel: int,
    trust_remote_code: bool,
    sleeps: bool,
    adapter_rank: int | None,
    user: Mapping[str, Any],
) -> EngineArgs:
    """What vLLM is told, ``user``'s own arguments among it. ``sleeps``: it can leave its devices.

    Raises ValueError for options and sizes that vLLM does not have.
    """
    check_known(user, [field.name for field in fields(EngineArgs)], model)
    several = tensor_parallel * pipeline_parallel > 1
    return EngineArgs(
        model=directory,
        skip_tokenizer_init=True,
        trust_remote_code=trust_remote_code,
        dtype=str(dtype).removeprefix("torch."),
        tensor_parallel_size=tensor_parallel,
        pipeline_parallel_size=pipeline_parallel,
        distributed_executor_backend="mp" if several else "uni",
        enable_sleep_mode=sleeps,
        load_format="dummy",
        generation_config="vllm",
        logits_processors=[f"{CounterSampler.__module__}:{CounterSampler.__qualname__}"],
        logprobs_mode="processed_logits",
        async_scheduling=False,
        worker_extension_cls=f"{WeightLoader.__module__}.{WeightLoader.__qualname__}",
        **(
            {"enable_lora": True, "max_lora_rank": adapters.adapter_capacity(adapter_rank, model)}
            if adapter_rank
            else {}
        ),
        **{**(CPU if device == "cpu" else {}), **user},
    )


def check_arguments(arguments: EngineArgs, model: str) -> None:
    """Raises ValueError if vLLM cannot run what is in the directory, or not with these settings."""
    with _process_as_it_was(), _naming_the_model(arguments, model):
        _config(arguments)


def _config(arguments: EngineArgs) -> VllmConfig:
    config = arguments.create_engine_config()
    _check_heads(config.model_config.get_head_size())
    return config


@contextmanager
def _naming_the_model(arguments: EngineArgs, model: str) -> Iterator[None]:
    try:
        yield
    except Exception as problem:
        what, why = f"vLLM {vllm.__version__} cannot run '{arguments.model}'", shorten(str(problem), REASON)
        raise ValueError(f"models.{model}.load: {what} as it is set up here: {why}") from problem


def _check_heads(size: int) -> None:
    """Raises ValueError for a size that kernels for CPUs do not know: vLLM starts all the same."""
    if current_platform.is_cpu() and not CPUAttentionBackend.supports_head_size(size):
        known = ", ".join(map(str, CPUAttentionBackend.get_supported_head_sizes()))
        raise ValueError(f"its kernels for CPUs know heads of {known} numbers, and the model's have {size}")


@contextmanager
def _process_as_it_was() -> Iterator[None]:
    """vLLM seeds the random numbers of the whole process, and on CPU makes torch.set_num_threads do nothing; other
    models of this process have their own."""
    threads, python, numpy = torch.set_num_threads, random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch.set_num_threads = threads
        random.setstate(python)
        np.random.set_state(numpy)
