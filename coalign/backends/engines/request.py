"""A request to an engine, its response, their state while the engine computes, and the Batch of samples.

A sample whose status is PARTIAL goes on after the tokens that it has; any other is finished. Prompts are samples
without a response, so there is one way to generate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from coalign.backends.engines.sampling import stream_key
from coalign.config.schema import SamplingConfig
from coalign.data.batch import Batch
from coalign.data.images.placeholders import describe_placeholders
from coalign.types import TOKEN_COLUMNS, UNKNOWN_EXPERT, ImageSpan, Response, Status

Decoder = Callable[[Sequence[str]], Callable[[list[int]], str]]  # stop strings -> (token ids -> the text to search)
_INCOMPLETE = "\ufffd"  # what a tokenizer prints for a character of which some bytes are missing


class _StopFinder:
    """Watches one response as it grows. ``decode`` turns token ids into text. Each step decodes only the last few
    tokens and takes what the newest ones add to the text before them: a decoder may treat the first token of a text
    differently."""

    def __init__(self, stops: Sequence[str], decode: Callable[[list[int]], str]) -> None:
        self.stops = stops
        self.decode = decode
        self.keep = max(map(len, stops)) - 1
        self.tokens: list[int] = []
        self.context = 0  # tokens[context:done] have been decoded and give the new ones their context
        self.done = 0
        self.tail = ""

    def push(self, token: int) -> bool:
        """Add the next token; True if a stop string is now complete."""
        self.tokens.append(token)
        prefix = self.decode(self.tokens[self.context : self.done])
        text = self.tail + self.decode(self.tokens[self.context :])[len(prefix) :]
        if any(stop in text for stop in self.stops):
            return True
        if not text.endswith(_INCOMPLETE):
            self.context, self.done = self.done, len(self.tokens)
            self.tail = text[-self.keep :] if self.keep else ""
        return False


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt (token ids) and the responses wanted: samples first..first+samples-1 of ``group``.

    A single sample may continue tokens that it already has. They end the prompt, and ``generated`` counts them; the
    sample then goes on as if it had never stopped.

    A single sample may also be a conversation with one request per turn. Each prompt begins with the last turn's prompt
    and answer, and ``first_turn`` counts the prompt tokens of the first turn. ``generated`` then counts this turn's.
    """

    prompt: list[int]
    group: int
    samples: int = 1
    first: int = 0
    generated: int = 0
    limit: int | None = None
    """New tokens after which a sample is TRUNCATED; None: the sampling's max_new_tokens, less those generated."""
    pause: int | None = None
    """New tokens after which a sample is returned as PARTIAL; None: it goes on to its end."""
    origin: str = ""
    """The prompt's row in its file, in brackets, for messages."""
    stop: tuple[str, ...] | None = None
    """Strings that end a response; None: the sampling's."""
    first_turn: int | None = None
    """None: the request is not a conversation."""
    images: tuple[ImageSpan, ...] = ()
    """Where images stand in the prompt."""
    restarts: int = 0
    """Number of the sample's stream of random numbers: 0, and another one for what branches off in its episode."""
    stream: int | None = None
    """Number that chooses the random numbers in place of ``group``: requests of one number sample alike."""

    @property
    def decoded(self) -> int:
        """Tokens at the prompt's end that a decoding step computed, or would have. They are computed one by one again,
        so that the bits do not depend on whether keys and values were kept."""
        return self.generated if self.first_turn is None else len(self.prompt) - self.first_turn


OnDone = Callable[[int, Response], object]  # (which of the request's samples, from 0; its response)


@dataclass(slots=True, eq=False)
class SubmittedRequest:
    """A request that an engine has accepted."""

    request: Request
    limit: int  # new tokens after which a sample ends with the status ``at_limit``
    at_limit: Status
    on_done: OnDone
    cut: bool = False  # at the next step its samples are returned as they are
    started: int = 0  # samples that are being computed, or done
    tokens_prefilled: int = 0  # prompt tokens that were computed
    tokens_kept: int = 0  # prompt tokens that were found in the KV cache
    successors: list[SubmittedRequest] = field(default_factory=list)  # requests that continue its samples

    @classmethod
    def plan(
        cls, request: Request, sampling: SamplingConfig, on_done: OnDone, *, vocabulary: int, context: int | None
    ) -> Self:
        """Accept a request: decide after how many tokens its samples end, and with which status. ``context``: tokens of
        the longest sequence. Raises ValueError for a prompt that is empty, holds an unknown token, or leaves no token
        to generate."""
        length, name = len(request.prompt), f"the prompt of group {request.group}{request.origin}"
        if not length:
            raise ValueError(f"{name} has no tokens")
        if not 0 <= min(request.prompt) <= max(request.prompt) < vocabulary:
            raise ValueError(f"{name} holds a token id outside of 0..{vocabulary - 1}")
        single = request.generated or request.first_turn is not None
        if single and (request.samples > 1 or not 0 <= request.decoded < length):
            raise ValueError(f"{name}: {request.decoded} of {length} tokens are begun, of {request.samples} samples")
        limit = sampling.max_new_tokens - request.generated if request.limit is None else request.limit
        if context is not None:
            if length >= context:
                seen = describe_placeholders(request.images)
                raise ValueError(f"{name} has {length} tokens{seen}; the model's context is {context}")
            limit = min(limit, context - length)
        if limit < 1:
            raise ValueError(f"{name} leaves no token to generate: {request.generated} are begun, the limit is {limit}")
        if request.pause is not None and request.pause < limit:
            return cls(request, request.pause, Status.PARTIAL, on_done)
        return cls(request, limit, Status.TRUNCATED, on_done)

    @property
    def sample(self) -> tuple[int, int]:
        """Group and index of the first sample."""
        return self.request.group, self.request.first

    def find_key(self, seed: int, offset: int) -> int:
        """Return the key of the random stream of the sample ``offset`` behind the request's first."""
        request = self.request
        stream = request.group if request.stream is None else request.stream
        return stream_key(seed, stream, request.first + offset, request.restarts)

    @property
    def waiting(self) -> int:
        """Samples that have not been started."""
        return self.request.samples - self.started

    @property
    def longest(self) -> int:
        """The most tokens that a sample can have, its prompt included."""
        return len(self.request.prompt) + self.limit

    @property
    def prompt_tokens(self) -> tuple[int, int]:
        """Prompt tokens computed, and found in the KV cache, by this request and its successors."""
        prefilled, kept = self.tokens_prefilled, self.tokens_kept
        for successor in list(self.successors):
            more = successor.prompt_tokens
            prefilled, kept = prefilled + more[0], kept + more[1]
        return prefilled, kept

    def find_stops(self, sampling: SamplingConfig, decoder: Decoder) -> _StopFinder | None:
        """Create the _StopFinder of one sample, which has read the tokens generated; None if no string ends it."""
        request = self.request
        strings = sampling.stop if request.stop is None else request.stop
        if not strings:
            return None
        finder = _StopFinder(strings, decoder(strings))
        for token in request.prompt[len(request.prompt) - request.generated :]:
            finder.push(token)
        return finder


@dataclass(slots=True, eq=False)
class PartialResponse:
    """The response of one sample as it grows; ``offset`` is its number among the samples of its request."""

    submitted: SubmittedRequest
    offset: int
    stops: _StopFinder | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    experts: Tensor | None = None  # see Response

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return len(self.submitted.request.prompt) + len(self.tokens)

    def add(self, token: int, logprob: float, version: int, end_tokens: frozenset[int]) -> Status | None:
        """Record the next token; return the status if the response ends with it."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token in end_tokens or (self.stops is not None and self.stops.push(token)):
            return Status.OK
        return self.submitted.at_limit if len(self.tokens) == self.submitted.limit else None

    def response(self, status: Status) -> Response:
        return Response(
            torch.tensor(self.tokens, dtype=torch.int32),
            torch.tensor(self.logprobs, dtype=torch.float32),
            torch.tensor(self.versions, dtype=torch.int32),
            status,
            self.experts,
        )

    def create_successor(self) -> SubmittedRequest:
        """Create the request that continues these tokens, and in the end hands over the complete response."""
        old, count = self.submitted, len(self.tokens)
        request = replace(
            old.request,
            prompt=[*old.request.prompt, *self.tokens],
            samples=1,
            first=old.request.first + self.offset,
            generated=old.request.generated + count,
            limit=old.limit - count,
            pause=None,  # it is part of old.limit
        )
        successor = type(old)(request, old.limit - count, old.at_limit, self._finish)
        old.successors.append(successor)  # before the mark is read: another thread may cut just now
        if old.cut:
            successor.cut = True
        return successor

    def _finish(self, offset: int, response: Response) -> None:
        """Hand over these tokens and those of the successor, whose experts cover both."""
        earlier, names = self.response(response.status), ("tokens", "logprobs", "versions")
        joined = {name: torch.cat([getattr(earlier, name), getattr(response, name)]) for name in names}
        self.submitted.on_done(self.offset, replace(response, **joined))


PROMPT_COLUMNS = {"loss_mask": False, "rollout_logprobs": 0.0, "versions": -1}  # for tokens that no policy chose


def begin_samples(prompts: Batch, samples: int) -> Batch:
    """Repeat each prompt as ``samples`` samples without a response, ordered by prompt, then index. prompts: columns
    ``tokens`` and ``group``, and any sequence columns, which are repeated. A column ``samples`` holds a number for each
    prompt and replaces the argument."""
    counts = prompts["samples"].long() if "samples" in prompts else torch.full((len(prompts),), samples)
    repeated = prompts.without("samples").select(torch.arange(len(prompts)).repeat_interleave(counts))
    size = (repeated.tokens_total,)
    log = {name: torch.full(size, value, dtype=TOKEN_COLUMNS[name]) for name, value in PROMPT_COLUMNS.items()}
    sequence = {
        "index": (torch.arange(len(repeated)) - (counts.cumsum(0) - counts).repeat_interleave(counts)).int(),
        "prompt_length": repeated.lengths.to(torch.int32),
        "status": torch.full((len(repeated),), int(Status.PARTIAL), dtype=torch.uint8),
    }
    token = {"tokens": repeated["tokens"].to(torch.int32), **log}
    return Batch(repeated.lengths, token, {**repeated.sequence, **sequence})


def plan_requests(
    samples: Batch, max_new_tokens: int, pause: int | None, longest: int | None
) -> tuple[list[int], list[Request]]:
    """Return the unfinished rows and the requests that finish them; samples without a response share their prompt.
    ``longest``: the most tokens of a sample that later models can read. Raises ValueError for a longer prompt."""
    tokens, offsets = samples["tokens"].tolist(), samples.offsets.tolist()
    prompt_lengths, groups, indices = (samples[name].tolist() for name in ("prompt_length", "group", "index"))
    fields = samples.get("rows") or [{}] * len(samples)
    origins = [f" ({row['_source']} row {row['_row']})" if "_source" in row else "" for row in fields]
    caps = samples.get("max_new_tokens")
    limits = [max_new_tokens] * len(samples) if caps is None else caps.clamp(max=max_new_tokens).tolist()
    if longest is not None:
        limits = [min(limit, longest - length) for limit, length in zip(limits, prompt_lengths, strict=True)]
        if longest <= (most := max(prompt_lengths, default=0)):
            row = prompt_lengths.index(most)
            name = f"the prompt of group {groups[row]}{origins[row]}"
            raise ValueError(
                f"{name} has {most} tokens, and a model that reads samples takes {longest} at once "
                "(max_tokens_per_micro): raise that, or bound prompts (data.max_prompt_tokens)"
            )
    images = samples.get("images") or [()] * len(samples)
    rows = (samples["status"] == Status.PARTIAL).nonzero().flatten().tolist()
    requests: list[Request] = []
    counts: list[int] = []  # samples of each request
    shared = None  # what the samples of the last request have in common; None if it continues a response
    for row in rows:
        prompt = tokens[offsets[row] : offsets[row + 1]]
        generated = len(prompt) - prompt_lengths[row]
        terms = (prompt, groups[row], limits[row], origins[row], images[row])
        if not generated and terms == shared and requests[-1].first + counts[-1] == indices[row]:
            counts[-1] += 1
            continue
        more = {"origin": origins[row], "images": images[row]}
        limit = limits[row] - generated
        requests.append(Request(prompt, groups[row], 1, indices[row], generated, limit, pause, **more))
        counts.append(1)
        shared = None if generated else terms
    return rows, [replace(request, samples=count) for request, count in zip(requests, counts, strict=True)]


def extend_samples(
    samples: Batch, rows: Sequence[int], responses: Sequence[Response], experts: tuple[int, int] | None = None
) -> Batch:
    """Append ``responses[i]`` to row ``rows[i]`` (ascending); the other rows stay as they are. ``experts``: see
    InferenceEngine; those of a continued sample are all of the pass that continued it."""
    grown = torch.zeros(len(samples), dtype=torch.int64)
    grown[list(rows)] = torch.tensor([len(r.tokens) for r in responses], dtype=torch.int64)
    lengths = samples.lengths + grown
    pairs = torch.stack([samples.lengths, grown], 1).flatten()
    new = torch.tensor([False, True]).repeat(len(samples)).repeat_interleave(pairs)

    def column(name: str, chunks: Sequence[Tensor]) -> Tensor:
        out = torch.empty(len(new), dtype=TOKEN_COLUMNS[name])
        out[~new] = samples[name]
        out[new] = torch.cat([out[:0], *chunks])
        return out

    token = {
        "tokens": column("tokens", [r.tokens for r in responses]),
        "loss_mask": column("loss_mask", [torch.ones(len(r.tokens), dtype=torch.bool) for r in responses]),
        "rollout_logprobs": column("rollout_logprobs", [r.logprobs for r in responses]),
        "versions": column("versions", [r.versions for r in responses]),
    }
    if experts is not None:
        recorded: list[Tensor | None] = [None] * len(samples)
        if "routed_experts" in samples:
            recorded = list(samples["routed_experts"].split(samples.lengths.tolist()))
        for row, response in zip(rows, responses, strict=True):
            recorded[row] = recorded[row] if response.experts is None else response.experts
        token["routed_experts"] = stack_experts(recorded, lengths.tolist(), experts)
    status = samples["status"].clone()
    status[list(rows)] = torch.tensor([int(r.status) for r in responses], dtype=status.dtype)
    return Batch(lengths, token, {**samples.sequence, "status": status})


def stack_experts(recorded: Sequence[Tensor | None], lengths: Sequence[int], experts: tuple[int, int]) -> Tensor:
    """The column `routed_experts` of samples of these ``lengths``; ``recorded`` are those of their first tokens."""
    column = torch.full((sum(lengths), *experts), UNKNOWN_EXPERT, dtype=TOKEN_COLUMNS["routed_experts"])
    for rows, first in zip(column.split(list(lengths)), recorded, strict=True):
        if first is not None:
            rows[: len(first)] = first
    return column


def count_missing_groups(samples: Batch, min_complete: float) -> int:
    """Count the groups that must still be completed to reach the share ``min_complete`` of this worker's groups."""
    group, waiting = samples["group"], samples["status"] == Status.PARTIAL
    groups, incomplete = len(group.unique()), len(group[waiting].unique())
    return max(0, math.ceil(min_complete * groups - 1e-9) - (groups - incomplete))
