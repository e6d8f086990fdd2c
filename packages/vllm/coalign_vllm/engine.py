"""The vLLM engine: vLLM's scheduler and kernels, stepped by Coalign in this process.

A token depends on the weights and on (seed, group, index, position). The batch matters only as far as vLLM's kernels
round differently in another one (about 1e-6 of a logit in float32).

vLLM's own random streams count draws, so a response that continues on another replica would get other numbers. Its
log-probs are either those before the temperature or those after truncation. A logits processor solves both: it draws
the token by coalign.backends.engines.sampling and leaves no other token to choose. In the token's place it leaves the
log-prob, which vLLM then reports (``logprobs_mode: processed_logits``). Penalties are vLLM's own.
"""

from __future__ import annotations

import itertools
import math
import random
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from multiprocessing import connection
from textwrap import shorten
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import vllm
from torch import Tensor
from vllm import EngineArgs, RequestOutput, SamplingParams, TokensPrompt
from vllm.config import VllmConfig
from vllm.inputs import EngineInput, PromptType
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from coalign.backends import lora, refuse_unknown
from coalign.backends.engines.contract import GenerationSession, InferenceEngine, OnToken
from coalign.backends.engines.request import Decoder, PartialResponse, SubmittedRequest
from coalign.backends.engines.sampling import sample, uniforms
from coalign.backends.pretrained import building, find_tokenizer, get_directory
from coalign.config.schema import ModelConfig, SamplingConfig
from coalign.data.images.processor import ImageProcessor
from coalign.types import Status
from coalign_vllm import weight_loader
from coalign_vllm.images import ARGUMENTS, ImageInputs
from coalign_vllm.module import OWNED_ARGUMENTS
from coalign_vllm.stored_names import StoredNames
from coalign_vllm.weight_loader import WeightLoader, WeightOutlet

if TYPE_CHECKING:
    from coalign_vllm.engine import VLLMEngine

KEY, SAMPLING = "coalign_key", "coalign_sampling"  # in SamplingParams.extra_args
FORBIDDEN = "coalign_forbidden"  # in EngineArgs.additional_config


@dataclass(frozen=True, slots=True)
class _SampledRow:
    """One sequence of vLLM's batch. ``chosen`` is vLLM's own growing list of response tokens."""

    key: int
    sampling: SamplingConfig
    prompt_length: int
    chosen: list[int]


class _CounterSampler(LogitsProcessor):
    """Chooses each token by (stream key, position), from the logits of its own row. It never chooses what a model must
    not say, the ids in the settings' ``additional_config``."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        ids = cast(dict[str, Any], vllm_config.additional_config)[FORBIDDEN]
        self.forbidden = torch.tensor(ids, dtype=torch.int64, device=device)
        self.device = device
        self.rows: dict[int, _SampledRow] = {}
        self.samplings: list[SamplingConfig] = []  # those seen so far, so that equal ones are the same object

    def is_argmax_invariant(self) -> bool:
        """Processors that say so come last, after penalties."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.rows, batch_update, self._create_row)

    def apply(self, logits: Tensor) -> Tensor:
        """Return f32[B, V]: -inf, except for the log-prob of each row's chosen token."""
        rows = [self.rows[i] for i in range(len(logits))]
        logits = logits.index_fill_(1, self.forbidden, -torch.inf)
        keys = torch.tensor([row.key for row in rows], device=self.device)
        positions = torch.tensor([row.prompt_length + len(row.chosen) for row in rows], device=self.device)
        tokens, logprobs = self._sample(logits, uniforms(keys, positions), [row.sampling for row in rows])
        return logits.fill_(-torch.inf).scatter_(1, tokens[:, None], logprobs[:, None])

    def _sample(self, logits: Tensor, uniform: Tensor, samplings: Sequence[SamplingConfig]) -> tuple[Tensor, Tensor]:
        """Draw the token of each row as its session samples: i64[B], and their log-probs f32[B]."""
        alike: dict[int, list[int]] = {}
        for row, sampling in enumerate(samplings):
            alike.setdefault(id(sampling), []).append(row)
        if len(alike) == 1:
            return sample(logits, uniform, samplings[0])
        tokens, logprobs = (logits.new_empty(len(logits), dtype=dtype) for dtype in (torch.int64, torch.float32))
        for rows in alike.values():
            index = torch.tensor(rows, device=logits.device)
            tokens[index], logprobs[index] = sample(logits[index], uniform[index], samplings[rows[0]])
        return tokens, logprobs

    def _create_row(self, params: SamplingParams, prompt: list[int] | None, chosen: list[int]) -> _SampledRow:
        assert params.extra_args is not None and prompt is not None
        sampling = params.extra_args[SAMPLING]  # in a worker of another process, a copy for each request
        if sampling not in self.samplings:
            self.samplings.append(sampling)
        shared = self.samplings[self.samplings.index(sampling)]
        return _SampledRow(params.extra_args[KEY], shared, len(prompt), chosen)


class _VLLMSession(GenerationSession):
    """Submits every sample as one vLLM request. Samples of a prompt and turns of a conversation share keys and values
    through vLLM's prefix cache."""

    engine: VLLMEngine

    def __init__(self, engine: VLLMEngine, sampling: SamplingConfig, on_token: OnToken | None) -> None:
        super().__init__(engine, sampling, on_token)
        self._answers: dict[str, PartialResponse] = {}  # by vLLM's request id

    @property
    def active(self) -> Sequence[PartialResponse]:
        """Samples that wait within vLLM are among them: they might reuse keys and values of older weights."""
        return list(self._answers.values())

    @property
    def unstarted(self) -> int:
        return super().unstarted + sum(not answer.tokens for answer in self._answers.values())

    def forget(self, group: int, index: int) -> None:
        """vLLM's prefix cache keeps what there is room for."""

    def take_active(self) -> Sequence[PartialResponse]:
        answers = self.active
        self._abort(list(self._answers))
        self._answers.clear()
        return answers

    def requeue(self, requests: Sequence[SubmittedRequest]) -> None:
        for submitted in requests:
            self._begin(submitted)

    def step(self) -> None:
        while self.arrived:
            self._begin(self.arrived.popleft())
        cut = [name for name, answer in self._answers.items() if answer.submitted.cut]
        self._abort(cut)
        for name in cut:
            self.finish(self._answers.pop(name), Status.PARTIAL)
        if self._answers:
            outputs = self.engine.step()  # vLLM computes the requests of all sessions together
            for session in self.engine.sessions:
                cast(_VLLMSession, session).record_outputs(outputs)

    def close(self) -> None:
        super().close()
        self.take_active()

    def _begin(self, submitted: SubmittedRequest) -> None:
        request, engine = submitted.request, self.engine
        # The salt keeps requests from keys and values of older weights. Versions would not: they come again after a
        # roll-back.
        salt = str(engine.loads)
        prompt: PromptType | EngineInput = TokensPrompt(prompt_token_ids=request.prompt, cache_salt=salt)
        if request.images and engine.images is not None:
            prompt = engine.images.build(request.prompt, request.images, salt)
        for offset in range(request.samples):
            name = next(engine.request_ids)
            stops = submitted.find_stops(self.sampling, engine.decoder)
            self._answers[name] = PartialResponse(submitted, offset, stops)
            parameters = self._vllm_parameters(submitted, offset)
            engine.llm.add_request(name, prompt, parameters, lora_request=engine.lora_request)

    def _vllm_parameters(self, submitted: SubmittedRequest, offset: int) -> SamplingParams:
        engine = self.engine
        key = submitted.find_key(engine.seed, offset)
        return SamplingParams(
            temperature=1.0,  # _CounterSampler has left one token to choose
            repetition_penalty=self.sampling.repetition_penalty,
            max_tokens=submitted.limit,
            stop_token_ids=sorted(engine.end_tokens),
            ignore_eos=True,  # stop_token_ids has all end tokens
            logprobs=0,  # only the chosen token's
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={KEY: key, SAMPLING: self.sampling},
        )

    def record_outputs(self, outputs: list[RequestOutput]) -> None:
        """Add the tokens of this session's requests; finish those that end."""
        ended: dict[str, Status] = {}
        for output in outputs:
            if (answer := self._answers.get(output.request_id)) is None:
                continue
            if not answer.tokens:
                kept = output.num_cached_tokens or 0
                self.count_prompt(answer.submitted, prefilled=len(answer.submitted.request.prompt) - kept, kept=kept)
            status = self._add_tokens(answer, output)
            if status is not None:
                ended[output.request_id] = status
            elif output.finished:
                group, reason = answer.submitted.request.group, output.outputs[0].finish_reason
                raise RuntimeError(
                    f"vLLM ended a response of group {group} after {len(answer.tokens)} of {answer.submitted.limit} "
                    f"tokens: {reason}"
                )
        self._abort([output.request_id for output in outputs if output.request_id in ended and not output.finished])
        for name, status in ended.items():
            self.finish(self._answers.pop(name), status)

    def _add_tokens(self, answer: PartialResponse, output: RequestOutput) -> Status | None:
        [completion] = output.outputs
        status = None
        for token, choices in zip(completion.token_ids, completion.logprobs or (), strict=True):
            assert choices is not None
            logprob = choices[token].logprob
            if not math.isfinite(logprob):
                version, group = self.engine.version, answer.submitted.request.group
                raise FloatingPointError(f"logits are not finite (weights version {version}, group {group})")
            status = self.record(answer, token, logprob)
        return status

    def _abort(self, names: list[str]) -> None:
        if names:
            self.engine.llm.abort_request(names)


CPU = {"enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 2**30}  # compiling takes minutes there
REASON = 400  # characters of vLLM's error message that are shown: it may list all models that it supports
LOAD_SECONDS = 600.0  # time limit of a worker for one parcel of weights


class _WorkerProcesses:
    """Watches vLLM's processes of a replica's ranks, to tell which one ended first. ``workers`` are vLLM's handles. As
    soon as one process ends, vLLM ends the others."""

    def __init__(self, workers: Sequence[Any]) -> None:
        self._workers = workers
        self._first: Any = None
        threading.Thread(target=self._watch, name="vllm-workers", daemon=True).start()

    def _watch(self) -> None:
        ended = connection.wait([worker.proc.sentinel for worker in self._workers])
        self._first = next(worker for worker in self._workers if worker.proc.sentinel in ended)

    @property
    def lost(self) -> str | None:
        """A description of the process that ended first, if any."""
        if self._first is None:
            return None
        rank, process = self._first.rank, self._first.proc
        process.join(1)
        name, code = f"vLLM's process of rank {rank} of {len(self._workers)} (pid {process.pid})", process.exitcode
        if code is None or code >= 0:
            return f"{name} ended" if code is None else f"{name} ended with code {code}"
        hint = " (as the system does when memory is short)" if -code == signal.SIGKILL else ""
        return f"{name} was ended by {signal.Signals(-code).name}{hint}"


class VLLMEngine(InferenceEngine):
    """Generates with vLLM.

    shapes: those of all weights, by their names in memory; vLLM gets the weights as ``stored``. decoder: see
    coalign.backends.engines.request. adapter_rank: the rank of the LoRA adapters, all of which come with the weights
    each time; None: there are none. processor: given for a model that sees. Raises ValueError for an architecture, or
    for images, that vLLM cannot run.
    """

    session_class = _VLLMSession

    def __init__(
        self,
        arguments: EngineArgs,
        shapes: Mapping[str, torch.Size],
        stored: StoredNames,
        *,
        model: str,
        seed: int,
        end_tokens: Iterable[int],
        decoder: Decoder,
        adapter_rank: int | None,
        processor: ImageProcessor | None = None,
    ) -> None:
        super().__init__()
        self.seed, self.end_tokens, self.decoder = seed, frozenset(end_tokens), decoder
        self.shapes, self.stored, self.adapter_rank = shapes, stored, adapter_rank
        self.lora_request = weight_loader.ADAPTER_REQUEST if adapter_rank else None  # to apply them
        self.loads = 0  # number of times that weights were loaded
        self.pipelined = arguments.pipeline_parallel_size > 1
        self.remote = arguments.tensor_parallel_size * arguments.pipeline_parallel_size > 1
        self.llm, self.images = _start_engine(arguments, model, processor)
        client = cast(Any, self.llm.engine_core)  # an InprocClient, declared as its base class
        self._workers = _WorkerProcesses(client.engine_core.model_executor.workers) if self.remote else None
        config = self.llm.vllm_config
        self.eager = config.model_config.enforce_eager
        self.context = config.model_config.max_model_len
        self.vocabulary = config.model_config.get_vocab_size()
        self.request_ids = map(str, itertools.count())
        [self._fused, *_] = self.llm.collective_rpc("coalign_setup", args=(self.remote and self.eager,))
        self._outlet = WeightOutlet()

    @property
    def weights_dtype(self) -> torch.dtype | None:
        dtypes = set(self.llm.collective_rpc("coalign_dtype"))
        return dtypes.pop() if len(dtypes) == 1 else None

    def step(self) -> list[RequestOutput]:
        """Run one step of vLLM. In eager mode nothing is compiled: vLLM's sampler would still compile a function, which
        takes a minute on a CPU."""
        with torch.compiler.set_stance("force_eager" if self.eager else "default"), self._name_lost_worker():
            return cast(list[RequestOutput], self.llm.step())  # generation models only

    def close(self) -> None:
        self.llm.engine_core.shutdown()

    def _load(self, weights: Iterable[tuple[str, Tensor]], *, adopt: bool) -> None:
        """Copy the weights: vLLM packs them in its own way."""
        self.loads += 1
        if self.pipelined and self.sessions:
            raise RuntimeError("weights cannot change while a pipeline computes (pipeline_parallel)")
        taken: set[str] = set()
        with self._name_lost_worker():
            self._send(self.stored(self._check_weights(weights, taken)))
        self._check_complete(taken)

    def _send(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        complete = False
        call = self.llm.collective_rpc
        call("coalign_begin")
        try:
            if self.remote:
                for parcel in self._outlet.parcels(weights):
                    call("coalign_unpack", timeout=LOAD_SECONDS, args=(parcel,))
            else:
                call("coalign_take", args=(weights,))
            complete = True
        finally:
            call("coalign_end", timeout=LOAD_SECONDS, args=(complete,))

    @contextmanager
    def _name_lost_worker(self) -> Iterator[None]:
        """Raise an error that names the process that ended; vLLM only says that its wait was cancelled."""
        try:
            yield
        except RuntimeError as problem:
            if self._workers is not None and (lost := self._workers.lost):
                raise RuntimeError(lost) from problem
            raise

    def _check_weights(self, weights: Iterable[tuple[str, Tensor]], taken: set[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield weights and adapters, add weights to ``taken``; raise ValueError for one that does not fit."""
        adapters: dict[str, torch.Size] = {}
        for name, tensor in weights:
            if self.adapter_rank and lora.INFIX in name:
                adapters[name] = tensor.shape
                yield name, tensor.detach()
                continue
            shape = self.shapes.get(name)
            if shape is None:
                raise ValueError(f"the weights do not fit: '{name}' is no weight of the model")
            if tensor.shape != shape:
                raise ValueError(f"weight '{name}' has shape {list(tensor.shape)}; the model needs {list(shape)}")
            taken.add(name)
            yield name, tensor.detach()
        weight_loader.check_adapters(adapters, self.shapes, self.adapter_rank or 0)

    def _check_complete(self, taken: set[str]) -> None:
        """Raise ValueError if weights are missing: the first time any. Later it is an error to give a fused layer
        (queries, keys and values) in part: vLLM loses the rest of it."""
        needed, why = set(self.shapes), ""
        if self.version >= 0:
            needed = {sibling for name in taken for sibling in self._list_fused(name)}
            why = "; vLLM computes them as one layer with others that came"
        if missing := sorted(needed - taken):
            raise ValueError(f"the weights do not fit: missing {missing[:5]}{' …' * (len(missing) > 5)}{why}")

    def _list_fused(self, name: str) -> list[str]:
        path, _, leaf = name.rpartition(".")
        owner, _, layer = path.rpartition(".")
        fused = next((layers for layers in self._fused.values() if layer in layers and len(layers) > 1), [layer])
        return [sibling for fused_layer in fused if (sibling := f"{owner}.{fused_layer}.{leaf}") in self.shapes]


def create_engine_arguments(
    config: ModelConfig, model: str, device: str, adapter_rank: int | None = None, forbidden: Sequence[int] = ()
) -> EngineArgs:
    """Translate a model's configuration to vLLM's engine arguments. ``forbidden``: ids that it must not say. Raises
    ValueError for options and sizes that vLLM does not have."""
    names, section = [field.name for field in fields(EngineArgs)], f"models.{model}.vllm"
    refuse_unknown(config.vllm, names, OWNED_ARGUMENTS, section, "engine argument of vLLM")
    arguments: dict[str, Any] = {
        "model": str(get_directory(config)),
        "skip_tokenizer_init": True,
        "trust_remote_code": config.trust_remote_code,
        "dtype": config.compute_dtype or config.dtype,
        "tensor_parallel_size": config.tensor_parallel,
        "pipeline_parallel_size": config.pipeline_parallel,
        "distributed_executor_backend": "mp" if config.tensor_parallel * config.pipeline_parallel > 1 else "uni",
        "enable_sleep_mode": device != "cpu" and config.offload != [],
        "load_format": "dummy",
        "language_model_only": config.vision is None,  # whether vLLM leaves out the towers
        "generation_config": "vllm",
        "logits_processors": [f"{_CounterSampler.__module__}:{_CounterSampler.__qualname__}"],
        "logprobs_mode": "processed_logits",
        "async_scheduling": False,
        "worker_extension_cls": f"{WeightLoader.__module__}.{WeightLoader.__qualname__}",
    }
    if config.vision is not None:
        arguments |= ARGUMENTS | {"tokenizer": str(find_tokenizer(config))}
    if adapter_rank:
        arguments |= {"enable_lora": True, "max_lora_rank": weight_loader.adapter_capacity(adapter_rank, model)}
    arguments |= (CPU if device == "cpu" else {}) | config.vllm
    arguments["additional_config"] = {**(arguments.get("additional_config") or {}), FORBIDDEN: [*forbidden]}
    return EngineArgs(**arguments)


@building()  # vLLM sets the default dtype and the default device of the process meanwhile
def _start_engine(
    arguments: EngineArgs, model: str, processor: ImageProcessor | None
) -> tuple[LLMEngine, ImageInputs | None]:
    """Raise ValueError if vLLM cannot run the model in the directory with these settings."""
    with _preserve_process_state(), _explain_failure(arguments, model):
        config = _config(arguments, sees=processor is not None)
        images = processor and ImageInputs(config.model_config, processor)
        return LLMEngine.from_vllm_config(config, disable_log_stats=True), images


def check_arguments(arguments: EngineArgs, model: str, processor: ImageProcessor | None) -> None:
    """Raise ValueError if vLLM cannot run the model in the directory with these settings."""
    with _preserve_process_state(), _explain_failure(arguments, model):
        config = _config(arguments, sees=processor is not None)
        if processor is not None:
            ImageInputs(config.model_config, processor)


def _config(arguments: EngineArgs, *, sees: bool) -> VllmConfig:
    """Raise ValueError for head sizes, and image blocks that see ahead, which vLLM's CPU kernels do not support; vLLM
    would start all the same."""
    config = arguments.create_engine_config()
    size, on_cpu = config.model_config.get_head_size(), current_platform.is_cpu()
    if sees and on_cpu and config.model_config.is_mm_prefix_lm and not CPUAttentionBackend.supports_mm_prefix():
        raise ValueError("its kernels for CPUs let no token of an image see a later one, as here; use `native`")
    if on_cpu and not CPUAttentionBackend.supports_head_size(size):
        sizes = ", ".join(map(str, CPUAttentionBackend.get_supported_head_sizes()))
        raise ValueError(f"its kernels for CPUs know heads of {sizes} numbers, and the model's have {size}")
    return config


@contextmanager
def _explain_failure(arguments: EngineArgs, model: str) -> Iterator[None]:
    try:
        yield
    except Exception as problem:
        what, why = f"vLLM {vllm.__version__} cannot run '{arguments.model}'", shorten(str(problem), REASON)
        raise ValueError(f"models.{model}.load: {what} as it is set up here: {why}") from problem


@contextmanager
def _preserve_process_state() -> Iterator[None]:
    """Restore what vLLM changes in the whole process, for the other models in it. vLLM seeds the random number
    generators and, on CPU, replaces torch.set_num_threads by a function without effect."""
    threads, python, numpy = torch.set_num_threads, random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch.set_num_threads = threads
        random.setstate(python)
        np.random.set_state(numpy)
