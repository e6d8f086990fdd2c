"""What is asked of the engine, what it answers, and what it keeps of a request on its way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from coalign.native.stops import StopFinder
from coalign.types import Status


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt (token ids) and how many responses it wants: those with indices first..first+samples-1 of ``group``.

    A single sample goes on after tokens that it already has if they end the prompt and ``begun`` says how many they
    are; then it continues as if it had never stopped.

    A single sample may also be a conversation, with a request for each turn: ``opening`` is how many tokens the prompt
    of the first one had, and later prompts begin with what the one before was asked and answered.
    """

    prompt: list[int]
    group: int
    samples: int = 1
    first: int = 0
    begun: int = 0
    limit: int | None = None
    """New tokens after which a sample is TRUNCATED; None: the sampling's max_new_tokens, less those begun."""
    pause: int | None = None
    """New tokens after which a sample is handed back PARTIAL; None: it goes on to its end."""
    stop: tuple[str, ...] | None = None
    """Strings that end a response; None: the sampling's."""
    opening: int | None = None
    """None: no other turn follows, and none came before."""

    @property
    def decoded(self) -> int:
        """Tokens at the prompt's end that are computed one by one, as they are (or would have been) where a response
        is decoded: then it does not show whether keys and values were kept since."""
        return self.begun if self.opening is None else len(self.prompt) - self.opening


@dataclass(frozen=True, slots=True)
class Response:
    """tokens i32[R], logprobs f32[R], versions i32[R] of the chosen tokens.

    OK after an end token or stop string, TRUNCATED at the limit or the end of the context, PARTIAL if cut before.
    """

    tokens: Tensor
    logprobs: Tensor
    versions: Tensor
    status: Status


OnDone = Callable[[int, Response], None]  # (which of the request's samples, from 0; its response)


@dataclass(slots=True, eq=False)
class Prompt:
    """A request on its way: ``started`` of its samples have been given a slot."""

    request: Request
    limit: int  # new tokens, after which a sample has the status ``at_limit``
    at_limit: Status
    on_done: OnDone
    started: int = 0
    cut: bool = False  # at the next step its samples are handed back as they are
    # What the prefill gave, by the weights of ``version``; kept while samples wait for a slot.
    version: int | None = None
    logits: Tensor | None = None  # f32[1, V] after the prompt
    prefix: list[Tensor] | None = None  # keys and values

    @property
    def sample(self) -> tuple[int, int]:
        """Group and index of the first."""
        return self.request.group, self.request.first

    @property
    def waiting(self) -> int:
        """Samples without a slot."""
        return self.request.samples - self.started

    @property
    def longest(self) -> int:
        """Tokens a sample may come to, its prompt included."""
        return len(self.request.prompt) + self.limit


@dataclass(slots=True, eq=False)
class Active:
    """One sample in ``slot`` of the KV cache, being decoded or kept; ``place`` among its request's samples."""

    prompt: Prompt
    place: int
    slot: int
    stops: StopFinder | None
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]

    @staticmethod
    def begin(prompt: Prompt, place: int, slot: int, stops: StopFinder | None) -> Active:
        return Active(prompt, place, slot, stops, [], [], [])

    @property
    def length(self) -> int:
        """Tokens in the KV cache or about to be."""
        return len(self.prompt.request.prompt) + len(self.tokens)

    def leads_to(self, prompt: Prompt) -> bool:
        """Whether ``prompt`` goes on with this sample from where it is."""
        if self.prompt.sample != prompt.sample or self.prompt.request.opening != prompt.request.opening:
            return False
        return [*self.prompt.request.prompt, *self.tokens] == prompt.request.prompt[: self.length]

    def response(self, status: Status) -> Response:
        return Response(
            torch.tensor(self.tokens, dtype=torch.int32),
            torch.tensor(self.logprobs, dtype=torch.float32),
            torch.tensor(self.versions, dtype=torch.int32),
            status,
        )
