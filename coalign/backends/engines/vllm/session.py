"""Schedules Coalign's requests on vLLM, and draws their tokens inside vLLM's sampler.

vLLM's own random streams count draws, so a response that continues on another replica would get other numbers. Its
log-probs are either those before the temperature or those after truncation. A logits processor solves both: it draws
the token by coalign.backends.engines.sampling and leaves no other token to choose. In the token's place it leaves the
log-prob, which vLLM then reports (``logprobs_mode: processed_logits``). Penalties are vLLM's own.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm import RequestOutput, SamplingParams, TokensPrompt
from vllm.config import VllmConfig
from vllm.sampling_params import RequestOutputKind
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from coalign.backends.engines.contract import GenerationSession, OnToken
from coalign.backends.engines.request import OnDone, PartialResponse, Request, SubmittedRequest
from coalign.backends.engines.sampling import sample, uniforms
from coalign.config.schema import SamplingConfig
from coalign.types import Status

if TYPE_CHECKING:
    from coalign.backends.engines.vllm.engine import VLLMEngine


KEY, SAMPLING = "coalign_key", "coalign_sampling"  # in SamplingParams.extra_args


@dataclass(frozen=True, slots=True)
class SampledRow:
    """One sequence of vLLM's batch. ``chosen`` is vLLM's own growing list of response tokens."""

    key: int
    sampling: SamplingConfig
    prompt_length: int
    chosen: list[int]


class CounterSampler(LogitsProcessor):
    """Chooses each token by (stream key, position), from the logits of its own row."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.device = device
        self.rows: dict[int, SampledRow] = {}

    def is_argmax_invariant(self) -> bool:
        """Processors that say so come last, after penalties."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.rows, batch_update, _row)

    def apply(self, logits: Tensor) -> Tensor:
        """Return f32[B, V]: -inf, except for the log-prob of each row's chosen token."""
        rows = [self.rows[i] for i in range(len(logits))]
        keys = torch.tensor([row.key for row in rows], device=self.device)
        positions = torch.tensor([row.prompt_length + len(row.chosen) for row in rows], device=self.device)
        # There is one session at a time, so all rows are sampled alike.
        tokens, logprobs = sample(logits, uniforms(keys, positions), rows[0].sampling)
        return logits.fill_(-torch.inf).scatter_(1, tokens[:, None], logprobs[:, None])


def _row(params: SamplingParams, prompt: list[int] | None, chosen: list[int]) -> SampledRow:
    assert params.extra_args is not None and prompt is not None
    return SampledRow(params.extra_args[KEY], params.extra_args[SAMPLING], len(prompt), chosen)


class VLLMSession(GenerationSession):
    """Submits every sample as one vLLM request.

    Samples of a prompt and turns of a conversation share keys and values through vLLM's prefix cache.
    """

    def __init__(self, engine: VLLMEngine, sampling: SamplingConfig, on_token: OnToken | None = None) -> None:
        super().__init__(engine.context)
        self.engine = engine
        self.sampling = sampling
        self.on_token = on_token
        self._arrived: deque[SubmittedRequest] = deque()
        self._answers: dict[str, PartialResponse] = {}  # by vLLM's request id

    @property
    def unfinished(self) -> bool:
        return bool(self._arrived or self._answers)

    def submit(self, request: Request, on_done: OnDone) -> SubmittedRequest:
        vocabulary, context = self.engine.vocabulary, self.engine.context
        submitted = SubmittedRequest.plan(request, self.sampling, on_done, vocabulary=vocabulary, context=context)
        self._arrived.append(submitted)
        return submitted

    def cut_all(self) -> None:
        self.cut(*self._arrived, *(answer.submitted for answer in self._answers.values()))

    def step(self) -> None:
        while self._arrived:
            self._begin(self._arrived.popleft())
        cut = [name for name, answer in self._answers.items() if answer.submitted.cut]
        self._abort(cut)
        for name in cut:
            self._finish(name, Status.PARTIAL)
        if self._answers:
            self._record(self.engine.step())

    def close(self) -> None:
        """Abort unfinished requests."""
        self._abort(list(self._answers))
        self._answers.clear()

    def _begin(self, submitted: SubmittedRequest) -> None:
        request, engine = submitted.request, self.engine
        self.total += request.samples
        for place in range(request.samples):
            name = next(engine.request_ids)
            stops = submitted.find_stops(self.sampling, engine.decoder)
            self._answers[name] = PartialResponse(submitted, place, stops)
            # The salt keeps requests from keys and values of older weights. Versions would not: they come again after
            # a roll-back.
            prompt = TokensPrompt(prompt_token_ids=request.prompt, cache_salt=str(engine.loads))
            parameters = self._vllm_parameters(submitted, place)
            engine.llm.add_request(name, prompt, parameters, lora_request=engine.lora_request)

    def _vllm_parameters(self, submitted: SubmittedRequest, place: int) -> SamplingParams:
        engine = self.engine
        key = submitted.find_key(engine.seed, place)
        return SamplingParams(
            temperature=1.0,  # CounterSampler has left one token to choose
            repetition_penalty=self.sampling.repetition_penalty,
            max_tokens=submitted.limit,
            stop_token_ids=sorted(engine.end_tokens),
            ignore_eos=True,  # stop_token_ids has all end tokens
            logprobs=0,  # of the chosen token alone
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={KEY: key, SAMPLING: self.sampling},
        )

    def _record(self, outputs: list[RequestOutput]) -> None:
        ended: dict[str, Status] = {}
        for output in outputs:
            if (answer := self._answers.get(output.request_id)) is None:
                continue
            if not answer.tokens:
                self.tokens_kept += output.num_cached_tokens or 0
                self.tokens_prefilled += len(answer.submitted.request.prompt) - (output.num_cached_tokens or 0)
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
            self._finish(name, status)

    def _add_tokens(self, answer: PartialResponse, output: RequestOutput) -> Status | None:
        [completion] = output.outputs
        request, version, status = answer.submitted.request, self.engine.version, None
        for token, found in zip(completion.token_ids, completion.logprobs or (), strict=True):
            assert found is not None
            logprob = found[token].logprob
            if not math.isfinite(logprob):
                raise FloatingPointError(f"logits are not finite (weights version {version}, group {request.group})")
            status = answer.add(token, logprob, version, self.engine.end_tokens)
            self.tokens_chosen += 1
            if self.on_token is not None:
                self.on_token(request.group, request.first + answer.place, token)
        return status

    def _abort(self, names: list[str]) -> None:
        if names:
            self.engine.llm.abort_request(names)

    def _finish(self, name: str, status: Status) -> None:
        answer = self._answers.pop(name)
        self.finished += 1
        answer.submitted.on_done(answer.place, answer.response(status))
