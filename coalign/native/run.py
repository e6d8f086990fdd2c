"""Continuous batching: requests wait, get slots of the KV cache, are decoded together, and leave as they finish."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coalign.native.attention import STRIDE, Decode, KVCache, Prefill
from coalign.native.linear import ROWS
from coalign.native.request import Active, Prompt, Request, Response
from coalign.native.sampling import Sampling, sample, stream_key, uniforms
from coalign.native.stops import StopFinder
from coalign.types import Status

if TYPE_CHECKING:
    from coalign.native.engine import Engine

OnToken = Callable[[int, int, int], None]  # (group, index, token)

# Rows of the state, one column for each slot: the next token to feed, its position, the key of the random stream, and
# where the next output goes.
TOKEN, POSITION, KEY, ROW, COLUMN = range(5)


class Run:
    """The state of one ``generate`` call.

    Active sequences stand in the slots 0..n-1 of the KV cache, so that decoding reads them as one block; a slot that
    becomes free is filled from the end.
    """

    def __init__(
        self, engine: Engine, requests: Sequence[Request], sampling: Sampling, on_token: OnToken | None = None
    ) -> None:
        self.engine = engine
        self.model = engine.model
        self.sampling = sampling
        self.on_token = on_token
        self.prompts = self._plan(requests)
        self.waiting = deque(p for p in self.prompts if p.request.samples)
        self.total = sum(p.request.samples for p in self.prompts)
        self.finished = 0
        self.tokens_chosen = 0
        self.active: list[Active] = []  # active[i] is in slot i
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

    def _plan(self, requests: Sequence[Request]) -> list[Prompt]:
        """Refuse what can never fit, and give every sample its row in the outputs."""
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
            prompts.append(Prompt(request, limit, row))
            row += request.samples
        return prompts

    def _allocate(self) -> None:
        engine, device = self.engine, self.model.device
        longest = max((len(p.request.prompt) + p.limit for p in self.prompts), default=1)
        length = -(-longest // STRIDE) * STRIDE
        budget = engine.max_sequences if engine.kv_tokens is None else max(1, engine.kv_tokens // longest)
        self.slots = min(engine.max_sequences, budget, max(self.total, 1))
        rows = -(-self.slots // ROWS) * ROWS  # the surplus holds padding rows; the first position of each is touched
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

    def _start(self, prompt: Prompt) -> slice:
        """Put as many of the prompt's samples into slots as fit; returns the slots."""
        count = min(prompt.request.samples - prompt.started, self.slots - len(self.active))
        slots = slice(len(self.active), len(self.active) + count)
        for index in range(prompt.started, prompt.started + count):
            slot = len(self.active)
            sequence = Active(prompt, prompt.first_row + index, slot)
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

    def _prefill(self, fresh: list[tuple[Prompt, slice]]) -> None:
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
                prompt.prefix = self.cache.read(slots.start, len(prompt.request.prompt))

    def _decode(self) -> None:
        """One more token for every active sequence."""
        if not self.active:
            return
        count = len(self.active)
        rows = -(-count // ROWS) * ROWS
        tokens, positions = self.state[TOKEN, :rows], self.state[POSITION, :rows]
        columns = max(len(s.prompt.request.prompt) + s.length for s in self.active)
        logits = self.model.forward(tokens, positions, Decode(self.cache, positions, columns), None)
        self._choose(logits[:count], 0)

    def _choose(self, logits: Tensor, first: int) -> None:
        """Draw the next token of the slots from ``first`` on, and write it down. logits [their number, V]."""
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
        """Note the new tokens of the slots from ``first`` on; sequences that have ended leave."""
        ended = []
        for sequence, token in zip(self.active[first:], tokens, strict=True):
            sequence.length += 1
            if self.on_token is not None:
                prompt = sequence.prompt
                self.on_token(prompt.request.group, sequence.row - prompt.first_row, token)
            stopped = token in self.engine.end_tokens or (sequence.stops is not None and sequence.stops.push(token))
            if stopped:
                self.statuses[sequence.row] = Status.OK
            if stopped or sequence.length == sequence.prompt.limit:
                ended.append(sequence)
        for sequence in reversed(ended):  # the last slot first: then what fills a free slot has not ended itself
            self.lengths[sequence.row] = sequence.length
            self.finished += 1
            self._vacate(sequence.slot)

    def _vacate(self, slot: int) -> None:
        """Move the sequence of the last slot into ``slot``."""
        moved = self.active.pop()
        if moved.slot != slot:
            length = len(moved.prompt.request.prompt) + moved.length
            self.cache.write(slice(slot, slot + 1), self.cache.read(moved.slot, length))
            self.state[:, slot] = self.state[:, moved.slot]
            if self.seen is not None:
                self.seen[slot] = self.seen[moved.slot]
            self.active[slot] = moved
        self.state[:, moved.slot] = 0
        moved.slot = slot
