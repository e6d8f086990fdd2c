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
    def waiting(self) -> int:
        """Samples without a slot."""
        return self.request.samples - self.started

    @property
    def longest(self) -> int:
        """Tokens a sample may come to, its prompt included."""
        return len(self.request.prompt) + self.limit


@dataclass(slots=True, eq=False)
class Active:
    """One sample that is being decoded, in ``slot`` of the KV cache; ``place`` among its request's samples."""

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

    def response(self, status: Status) -> Response:
        return Response(
            torch.tensor(self.tokens, dtype=torch.int32),
            torch.tensor(self.logprobs, dtype=torch.float32),
            torch.tensor(self.versions, dtype=torch.int32),
            status,
        )
