"""What is asked of the engine, what it answers, and what it keeps of a request on its way."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coalign.native.stops import StopFinder
from coalign.types import Status


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt (token ids) and how many responses it wants: those with indices 0..samples-1 of ``group``."""

    prompt: list[int]
    group: int
    samples: int = 1


@dataclass(frozen=True, slots=True)
class Response:
    """tokens i32[R], logprobs f32[R], versions i32[R] of the chosen tokens; OK after an end token or stop string."""

    tokens: Tensor
    logprobs: Tensor
    versions: Tensor
    status: Status


@dataclass(slots=True)
class Prompt:
    """A request on its way: ``started`` of its samples have been given a slot."""

    request: Request
    limit: int  # response tokens
    first_row: int  # of its samples, in the outputs
    started: int = 0
    # What the prefill gave, by the weights of ``version``; kept while samples wait for a slot.
    version: int | None = None
    logits: Tensor | None = None  # f32[1, V] after the prompt
    prefix: list[Tensor] | None = None  # keys and values


@dataclass(slots=True, eq=False)
class Active:
    """One sample that is being decoded: the ``row`` of its outputs, the ``slot`` of the KV cache it is in."""

    prompt: Prompt
    row: int
    slot: int
    length: int = 0  # of the response
    stops: StopFinder | None = None
