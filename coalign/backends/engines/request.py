"""What is asked of an engine, what it answers, and what an answer is until it is complete.

Stop strings, found across token boundaries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coalign.backends.engines.sampling import Sampling
from coalign.types import Status

Decoder = Callable[[Sequence[str]], Callable[[list[int]], str]]  # from stop strings to tokens -> the text to search
_PARTIAL = "\ufffd"  # what a tokenizer prints for a character whose bytes are not all there yet


class StopFinder:
    """Watches one response as it grows.

    ``decode`` turns token ids into text. Only the last few tokens are decoded at each step: what they add to the
    text of the tokens before them (a decoder may treat the first token of a text in its own way).
    """

    def __init__(self, stops: Sequence[str], decode: Callable[[list[int]], str]) -> None:
        self.stops = stops
        self.decode = decode
        self.keep = max(map(len, stops)) - 1
        self.tokens: list[int] = []
        self.context = 0  # tokens[context:done] have been decoded and give the new ones their context
        self.done = 0
        self.tail = ""

    def push(self, token: int) -> bool:
        """Add the response's next token; True if a stop string is now complete."""
        self.tokens.append(token)
        before = self.decode(self.tokens[self.context : self.done])
        text = self.tail + self.decode(self.tokens[self.context :])[len(before) :]
        if any(stop in text for stop in self.stops):
            return True
        if not text.endswith(_PARTIAL):
            self.context, self.done = self.done, len(self.tokens)
            self.tail = text[-self.keep :] if self.keep else ""
        return False


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
    """A request on its way."""

    request: Request
    limit: int  # new tokens, after which a sample has the status ``at_limit``
    at_limit: Status
    on_done: OnDone
    cut: bool = False  # at the next step its samples are handed back as they are

    @classmethod
    def plan(cls, request: Request, sampling: Sampling, on_done: OnDone, *, vocabulary: int, context: int | None):
        """How far each sample goes, and what it is then. ``context``: tokens of the longest sequence.

        Raises ValueError for a prompt that is empty, holds an unknown token, or leaves no room.
        """
        length, name = len(request.prompt), f"the prompt of group {request.group}"
        if not length:
            raise ValueError(f"{name} has no tokens")
        if not 0 <= min(request.prompt) <= max(request.prompt) < vocabulary:
            raise ValueError(f"{name} holds a token id outside of 0..{vocabulary - 1}")
        single = request.begun or request.opening is not None
        if single and (request.samples > 1 or not 0 <= request.decoded < length):
            raise ValueError(f"{name}: {request.decoded} of {length} tokens are begun, of {request.samples} samples")
        limit = sampling.max_new_tokens - request.begun if request.limit is None else request.limit
        if context is not None:
            if length >= context:
                raise ValueError(f"{name} has {length} tokens; the model's context is {context}")
            limit = min(limit, context - length)
        if limit < 1:
            raise ValueError(f"{name} leaves no room for a token: {request.begun} are begun, limit is {limit}")
        if request.pause is not None and request.pause < limit:
            return cls(request, request.pause, Status.PARTIAL, on_done)
        return cls(request, limit, Status.TRUNCATED, on_done)

    @property
    def longest(self) -> int:
        """Tokens a sample may come to, its prompt included."""
        return len(self.request.prompt) + self.limit

    def stops(self, sampling: Sampling, decoder: Decoder) -> StopFinder | None:
        """Of one sample, which has seen the tokens that are begun; None if no string ends it."""
        request = self.request
        strings = sampling.stop if request.stop is None else request.stop
        if not strings:
            return None
        finder = StopFinder(strings, decoder(strings))
        for token in request.prompt[len(request.prompt) - request.begun :]:
            finder.push(token)
        return finder


@dataclass(slots=True, eq=False)
class Answer:
    """The response to one sample as it grows; ``place`` among those of its request."""

    prompt: Prompt
    place: int
    stops: StopFinder | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def add(self, token: int, logprob: float, version: int, end_tokens: frozenset[int]) -> Status | None:
        """Write down the next token; how the response ends, if it does."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token in end_tokens or (self.stops is not None and self.stops.push(token)):
            return Status.OK
        return self.prompt.at_limit if len(self.tokens) == self.prompt.limit else None

    def response(self, status: Status) -> Response:
        return Response(
            torch.tensor(self.tokens, dtype=torch.int32),
            torch.tensor(self.logprobs, dtype=torch.float32),
            torch.tensor(self.versions, dtype=torch.int32),
            status,
        )
