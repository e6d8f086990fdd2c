"""Requests on their way through vLLM's scheduler.

How vLLM draws Coalign's tokens: by coalign.backends.engines.sampling, inside of its own sampler.

vLLM's own random streams count draws, so a response that is continued elsewhere would not get the numbers that it would
have had, and its log-probs are either those before the temperature or those after truncation. A logits processor may do
all of that itself: it draws the token, and leaves no other one to choose. The value that it leaves in the token's place
is the token's log-prob, which vLLM then reports (``logprobs_mode: processed_logits``). Penalties are vLLM's own.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm import RequestOutput, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from coalign.backends.engines.contract import OnToken, Run
from coalign.backends.engines.request import Answer, OnDone, Prompt, Request
from coalign.backends.engines.sampling import Sampling, sample, stream_key, uniforms
from coalign.types import Status

if TYPE_CHECKING:
    from coalign.backends.engines.vllm.engine import VLLMEngine


KEY, SAMPLING = "coalign_key", "coalign_sampling"  # in SamplingParams.extra_args


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of vLLM's batch. ``chosen`` is vLLM's own list, which grows."""

    key: int
    sampling: Sampling
    prompt_length: int
    chosen: list[int]


class CounterSampler(LogitsProcessor):
    """Chooses each token by (stream key, position), from the logits of its own row alone."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.device = device
        self.rows: dict[int, Row] = {}

    def is_argmax_invariant(self) -> bool:
        """Processors that say so come last, after penalties."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.rows, batch_update, _row)

    def apply(self, logits: Tensor) -> Tensor:
        """f32[B, V]: -inf, but for the log-prob of each row's token."""
        rows = [self.rows[i] for i in range(len(logits))]
        keys = torch.tensor([row.key for row in rows], device=self.device)
        positions = torch.tensor([row.prompt_length + len(row.chosen) for row in rows], device=self.device)
        [sampling] = {row.sampling for row in rows}  # of the one open run
        tokens, logprobs = sample(logits, uniforms(keys, positions), sampling)
        return logits.fill_(-torch.inf).scatter_(1, tokens[:, None], logprobs[:, None])


def _row(params: SamplingParams, prompt: list[int] | None, chosen: list[int]) -> Row:
    return Row(params.extra_args[KEY], params.extra_args[SAMPLING], len(prompt), chosen)


class VLLMRun(Run):
    """Every sample is a request of vLLM's. Those of one prompt, and the turns of a conversation, find what they have in
    common in its prefix cache, which drops what has not been asked for the longest time."""

    def __init__(self, engine: VLLMEngine, sampling: Sampling, on_token: OnToken | None = None) -> None:
        super().__init__(engine.context)
        self.engine = engine
        self.sampling = sampling
        self.on_token = on_token
        self._arrived: deque[Prompt] = deque()
        self._answers: dict[str, Answer] = {}  # by the name that vLLM knows them by

    @property
    def unfinished(self) -> bool:
        return bool(self._arrived or self._answers)

    def submit(self, request: Request, on_done: OnDone) -> Prompt:
        vocabulary, context = self.engine.vocabulary, self.engine.context
        prompt = Prompt.plan(request, self.sampling, on_done, vocabulary=vocabulary, context=context)
        self._arrived.append(prompt)
        return prompt

    def cut_all(self) -> None:
        self.cut(*self._arrived, *(answer.prompt for answer in self._answers.values()))

    def step(self) -> None:
        while self._arrived:
            self._begin(self._arrived.popleft())
        self._hand_back()
        if self._answers:
            self._take(self.engine.step())

    def close(self) -> None:
        """End what is unfinished."""
        self._abort(list(self._answers))
        self._answers.clear()

    def _begin(self, prompt: Prompt) -> None:
        request, engine = prompt.request, self.engine
        self.total += request.samples
        for place in range(request.samples):
            name = engine.new_name()
            self._answers[name] = Answer(prompt, place, prompt.stops(self.sampling, engine.decoder))
            # The salt: keys and values of other weights are no answer. Versions come again, after a roll-back.
            asked = {"prompt_token_ids": request.prompt, "cache_salt": str(engine.loads)}
            engine.llm.add_request(name, asked, self._parameters(prompt, place), lora_request=engine.lora_request)

    def _parameters(self, prompt: Prompt, place: int) -> SamplingParams:
        request, engine = prompt.request, self.engine
        key = stream_key(engine.seed, request.group, request.first + place)
        return SamplingParams(
            temperature=1.0,  # what is left to choose from is chosen already: see sampler.py
            repetition_penalty=self.sampling.repetition_penalty,
            max_tokens=prompt.limit,
            stop_token_ids=sorted(engine.end_tokens),
            ignore_eos=True,  # those that count are in the line above
            logprobs=0,  # of the chosen token alone
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={KEY: key, SAMPLING: self.sampling},
        )

    def _hand_back(self) -> None:
        """End what was cut."""
        cut = [name for name, answer in self._answers.items() if answer.prompt.cut]
        self._abort(cut)
        for name in cut:
            self._finish(name, Status.PARTIAL)

    def _take(self, outputs: list[RequestOutput]) -> None:
        """Write down what a step gave, before anybody hears of a response that is complete."""
        ended: dict[str, Status] = {}
        for output in outputs:
            if (answer := self._answers.get(output.request_id)) is None:
                continue
            if not answer.tokens:
                self.tokens_kept += output.num_cached_tokens or 0
                self.tokens_prefilled += len(answer.prompt.request.prompt) - (output.num_cached_tokens or 0)
            status = self._note(answer, output)
            if status is not None:
                ended[output.request_id] = status
            elif output.finished:
                group, reason = answer.prompt.request.group, output.outputs[0].finish_reason
                raise RuntimeError(
                    f"vLLM ended a response of group {group} after {len(answer.tokens)} of {answer.prompt.limit} "
                    f"tokens: {reason}"
                )
        self._abort([output.request_id for output in outputs if output.request_id in ended and not output.finished])
        for name, status in ended.items():
            self._finish(name, status)

    def _note(self, answer: Answer, output: RequestOutput) -> Status | None:
        """Write down new tokens; how the response ends, if it does."""
        [completion] = output.outputs
        request, version, status = answer.prompt.request, self.engine.version, None
        for token, found in zip(completion.token_ids, completion.logprobs or (), strict=True):
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
        answer.prompt.on_done(answer.place, answer.response(status))
