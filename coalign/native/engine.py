"""Continuous batching: requests wait, get slots of the KV cache, are decoded together, and leave as they finish.

The engine knows no tokenizer, no Batch and no backend. What a token will be depends on the weights and on
(seed, group, index, position) only; see linear.py for how the arithmetic keeps to that.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coalign.native.attention import STRIDE, Decode, KVCache, Prefill
from coalign.native.gate import Gate
from coalign.native.linear import ROWS
from coalign.native.model import Model
from coalign.native.sampling import Sampling, sample, stream_key, uniforms
from coalign.native.stops import StopFinder
from coalign.types import Status

TOKEN, POSITION, KEY, ROW, COLUMN = range(5)  # of a slot's state: next token to feed, its position, key of the random
# stream, and where its next output goes

Progress = Callable[[int, int, int], None]  # (responses finished, responses in all, tokens chosen)


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
class _Prompt:
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
class _Sequence:
    prompt: _Prompt
    row: int
    slot: int
    length: int = 0  # of the response
    stops: StopFinder | None = None


class Engine:
    """Generates with ``model``.

    seed: of the sampling. max_sequences: decoded at once. kv_tokens: tokens the KV cache may hold (None: enough for
    max_sequences of the longest). prefill_tokens: prompt tokens in one forward (a longer prompt goes alone).
    end_tokens: ids that end a response. decode: token ids to text, for stop strings.
    """

    def __init__(
        self,
        model: Model,
        *,
        seed: int,
        max_sequences: int,
        kv_tokens: int | None,
        prefill_tokens: int,
        end_tokens: Iterable[int],
        decode: Callable[[list[int]], str],
    ) -> None:
        self.model = model
        self.seed = seed
        self.max_sequences = max_sequences
        self.kv_tokens = kv_tokens
        self.prefill_tokens = prefill_tokens
        self.end_tokens = frozenset(end_tokens)
        self.decode = decode
        self.version = -1
        self._gate = Gate()
        self._turn = threading.Lock()
        self._running: _Run | None = None

    def pause(self) -> None:
        """Stop at the next token boundary (any thread but the generating one); returns when nothing runs."""
        self._gate.hold()

    def resume(self) -> None:
        self._gate.release()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int, adopt: bool) -> None:
        """Take new weights at a token boundary: later tokens, also of responses under way, come from ``version``."""
        with self._gate.held():
            self.model.load(weights, adopt=adopt)
            self.version = version
            if self._running is not None:
                self.model.pack()

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, progress: Progress | None = None
    ) -> list[list[Response]]:
        """The responses of each request, by index. One call at a time: a second one waits.

        Raises ValueError for a prompt that is empty, holds an unknown token, or can never fit.
        """
        with self._turn, torch.inference_mode(), self.model.packed():
            with self._gate.held():
                run = self._running = _Run(self, requests, sampling)
            try:
                while run.unfinished:
                    with self._gate.step():
                        run.step()
                    if progress is not None:
                        progress(run.finished, run.total, run.tokens_chosen)
            finally:
                self._running = None
            return run.responses()


class _Run:
    """The state of one ``generate`` call."""

    def __init__(self, engine: Engine, requests: Sequence[Request], sampling: Sampling) -> None:
        self.engine = engine
        self.model = engine.model
        self.sampling = sampling
        self.prompts = self._plan(requests)
        self.waiting = deque(p for p in self.prompts if p.request.samples)
        self.total = sum(p.request.samples for p in self.prompts)
        self.finished = 0
        self.tokens_chosen = 0
        self.active: list[_Sequence] = []  # active[i] is in slot i
        self.statuses = [Status.TRUNCATED] * self.total
        self.lengths = [0] * self.total
        self._allocate()

    @property
    def unfinished(self) -> bool:
        return bool(self.waiting or self.active)

    def step(self) -> None:
        """Start what fits, then one token for everybody."""
        self._admit()
        self._decode()

    def responses(self) -> list[list[Response]]:
        tokens, logprobs, versions = (x.cpu() for x in (self.tokens, self.logprobs, self.versions))
        rows = [
            Response(tokens[i, :n].clone(), logprobs[i, :n].clone(), versions[i, :n].clone(), status)
            for i, (n, status) in enumerate(zip(self.lengths, self.statuses, strict=True))
        ]
        return [rows[p.first_row : p.first_row + p.request.samples] for p in self.prompts]

    def _plan(self, requests: Sequence[Request]) -> list[_Prompt]:
        context = getattr(self.model.module.config.get_text_config(), "max_position_embeddings", None)
        vocabulary, prompts, row = self.model.vocabulary, [], 0
        for i, request in enumerate(requests):
            length, limit = len(request.prompt), self.sampling.max_new_tokens
            if not length:
                raise ValueError(f"prompt {i} (group {request.group}) has no tokens")
            if not 0 <= min(request.prompt) <= max(request.prompt) < vocabulary:
                raise ValueError(f"prompt {i} (group {request.group}) holds a token id outside of 0..{vocabulary - 1}")
            if context is not None:
                if length >= context:
                    raise ValueError(
                        f"prompt {i} (group {request.group}) has {length} tokens; the model's context is {context}"
                    )
                limit = min(limit, context - length)
            if self.engine.kv_tokens is not None and length + limit > self.engine.kv_tokens:
                raise ValueError(
                    f"prompt {i} (group {request.group}) may need {length} + {limit} tokens; native.kv_tokens is "
                    f"{self.engine.kv_tokens}: raise it or shorten max_new_tokens"
                )
            prompts.append(_Prompt(request, limit, row))
            row += request.samples
        return prompts

    def _allocate(self) -> None:
        engine, device = self.engine, self.model.device
        longest = max((len(p.request.prompt) + p.limit for p in self.prompts), default=1)
        length = -(-longest // STRIDE) * STRIDE
        budget = engine.max_sequences if engine.kv_tokens is None else max(1, engine.kv_tokens // longest)
        self.slots = min(engine.max_sequences, budget, max(self.total, 1))
        rows = -(-self.slots // ROWS) * ROWS
        self.cache = KVCache(rows, length)
        self.state = torch.zeros(5, rows, dtype=torch.int64, device=device)
        widest = max((p.limit for p in self.prompts), default=0)
        self.tokens = torch.zeros(self.total, widest, dtype=torch.int32, device=device)
        self.logprobs = torch.zeros(self.total, widest, dtype=torch.float32, device=device)
        self.versions = torch.zeros(self.total, widest, dtype=torch.int32, device=device)
        self.seen = None
        if self.sampling.repetition_penalty != 1:
            self.seen = torch.zeros(rows, self.model.vocabulary, dtype=torch.bool, device=device)

    def _admit(self) -> None:
        """Give free slots to waiting samples, in order; prompts are packed into forwards of prefill_tokens."""
        while self.waiting and len(self.active) < self.slots:
            first, filled, fresh = len(self.active), 0, []
            while self.waiting and len(self.active) < self.slots:
                prompt = self.waiting[0]
                known = prompt.version == self.engine.version
                filled += 0 if known else len(prompt.request.prompt)
                if fresh and filled > self.engine.prefill_tokens:
                    break
                slots = self._start(prompt)
                if known:
                    self.cache.write(slots, prompt.prefix)
                else:
                    fresh.append((prompt, slots))
                if prompt.started == prompt.request.samples:
                    self.waiting.popleft()
            if fresh:
                self._prefill(fresh)
            started = self.active[first:]
            self._choose(torch.cat([s.prompt.logits for s in started]), first)
            for prompt in (s.prompt for s in started):
                if prompt.started == prompt.request.samples:
                    prompt.logits = prompt.prefix = None

    def _start(self, prompt: _Prompt) -> list[int]:
        """Put as many of the prompt's samples into slots as fit; returns the slots."""
        count = min(prompt.request.samples - prompt.started, self.slots - len(self.active))
        slots = list(range(len(self.active), len(self.active) + count))
        for index, slot in enumerate(slots, prompt.started):
            sequence = _Sequence(prompt, prompt.first_row + index, slot)
            if self.sampling.stop:
                sequence.stops = StopFinder(self.sampling.stop, self.engine.decode)
            key = stream_key(self.engine.seed, prompt.request.group, index)
            self.state[:, slot] = torch.tensor([0, len(prompt.request.prompt) - 1, key, sequence.row, 0])
            if self.seen is not None:
                self.seen[slot] = False
                self.seen[slot, prompt.request.prompt] = True
            self.active.append(sequence)
        prompt.started += count
        return slots

    def _prefill(self, fresh: list[tuple[_Prompt, list[int]]]) -> None:
        """Compute prompts; the keys and values of each go to its slots."""
        tokens, positions, segments, last = [], [], [], []
        for prompt, slots in fresh:
            start = len(tokens)
            tokens += prompt.request.prompt
            positions += range(len(prompt.request.prompt))
            segments.append((start, len(tokens), slots))
            last.append(len(tokens) - 1)
        padding = [0] * (-len(tokens) % ROWS)
        as_tensor = lambda values: torch.tensor(values, device=self.model.device)  # noqa: E731
        logits = self.model.forward(
            as_tensor(tokens + padding), as_tensor(positions + padding), Prefill(self.cache, segments), as_tensor(last)
        )
        for (prompt, slots), row in zip(fresh, logits.split(1), strict=True):
            prompt.logits, prompt.version = row, self.engine.version
            if prompt.started < prompt.request.samples:
                prompt.prefix = self.cache.read(slots[0], len(prompt.request.prompt))

    def _decode(self) -> None:
        if not self.active:
            return
        count = len(self.active)
        rows = -(-count // ROWS) * ROWS
        tokens, positions = self.state[TOKEN, :rows], self.state[POSITION, :rows]
        columns = max(len(s.prompt.request.prompt) + s.length for s in self.active)
        logits = self.model.forward(tokens, positions, Decode(self.cache, positions, columns), None)
        self._choose(logits[:count], 0)

    def _choose(self, logits: Tensor, first: int) -> None:
        """Draw the next token of the active sequences from slot ``first`` on and write it down. logits [their number, V]."""
        last = len(self.active)
        state = self.state[:, first:last]
        seen = None if self.seen is None else self.seen[first:last]
        tokens, logprobs = sample(logits, uniforms(state[KEY], state[POSITION] + 1), self.sampling, seen)
        row, column = state[ROW], state[COLUMN]
        self.tokens[row, column] = tokens.to(torch.int32)
        self.logprobs[row, column] = logprobs
        self.versions[row, column] = self.engine.version
        state[TOKEN] = tokens
        state[POSITION] += 1
        state[COLUMN] += 1
        if seen is not None:
            seen.scatter_(1, tokens[:, None], True)
        if not bool(logprobs.isfinite().all()):
            bad = (~logprobs.isfinite()).nonzero().flatten().tolist()
            groups = sorted({self.active[first + i].prompt.request.group for i in bad})
            raise FloatingPointError(f"logits are not finite (weights version {self.engine.version}, groups {groups})")
        self.tokens_chosen += last - first
        self._retire(first, tokens.tolist())

    def _retire(self, first: int, tokens: list[int]) -> None:
        """Note the new tokens; the slots of finished sequences are filled from the end, so that active ones stay together."""
        ended = []
        for sequence, token in zip(self.active[first:], tokens, strict=True):
            sequence.length += 1
            stopped = token in self.engine.end_tokens or (sequence.stops is not None and sequence.stops.push(token))
            if stopped:
                self.statuses[sequence.row] = Status.OK
            if stopped or sequence.length == sequence.prompt.limit:
                ended.append(sequence)
        for sequence in ended:
            self.lengths[sequence.row] = sequence.length
            self.finished += 1
            self._vacate(sequence.slot)

    def _vacate(self, slot: int) -> None:
        moved = self.active.pop()
        if moved.slot != slot:
            self.cache.write([slot], self.cache.read(moved.slot, len(moved.prompt.request.prompt) + moved.length))
            self.state[:, slot] = self.state[:, moved.slot]
            if self.seen is not None:
                self.seen[slot] = self.seen[moved.slot]
            self.active[slot] = moved
        self.state[:, moved.slot] = 0
        moved.slot = slot
