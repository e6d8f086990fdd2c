"""Continuous batching: requests wait, get slots of the KV cache, are decoded together, and leave as they finish."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coalign.native.attention import STRIDE, Decode, KVCache, Prefill, Segment
from coalign.native.linear import ROWS
from coalign.native.request import Active, OnDone, Prompt, Request
from coalign.native.sampling import Sampling, sample, stream_key, uniforms
from coalign.native.stops import StopFinder
from coalign.types import Status

if TYPE_CHECKING:
    from coalign.native.engine import Engine

OnToken = Callable[[int, int, int], None]  # (group, index, token)

# Rows of the state, one column for each slot: the next token to feed, its position, the key of the random stream.
TOKEN, POSITION, KEY = range(3)
_MORE = 5 / 4  # by which the cache grows at least, so that it does not grow at every step


class Run:
    """What the engine is working on. ``submit`` and ``cut`` may be called by any thread at any time, ``step`` by one.

    Active sequences stand in the slots 0..n-1 of the KV cache, so that decoding reads them as one block; a slot that
    becomes free is filled from the end. The cache is laid out for the longest sequence so far, for as many slots as the
    engine's kv_tokens allow of that; a request that needs longer ones waits until no more than that are active.
    """

    def __init__(self, engine: Engine, sampling: Sampling, on_token: OnToken | None = None) -> None:
        self.engine = engine
        self.model = engine.model
        self.sampling = sampling
        self.on_token = on_token
        self.arrived: deque[Prompt] = deque()
        self.waiting: deque[Prompt] = deque()
        self.active: list[Active] = []  # active[i] is in slot i
        self.total = self.finished = self.tokens_chosen = 0
        self.slots = self.longest = 0  # of the cache: sequences, and tokens of one
        self.cache = KVCache(0, 0)
        self.state = torch.zeros(3, 0, dtype=torch.int64, device=self.model.device)
        self.seen: Tensor | None = None
        if sampling.repetition_penalty != 1:
            self.seen = torch.zeros(0, self.model.vocabulary, dtype=torch.bool, device=self.model.device)

    @property
    def unfinished(self) -> bool:
        return bool(self.arrived or self.waiting or self.active)

    def submit(self, request: Request, on_done: OnDone) -> Prompt:
        """Ask for responses; ``on_done(place, response)`` hears of each on the thread that steps.

        Returns what ``cut`` takes. Raises ValueError for a prompt that is empty, holds an unknown token, or can never
        fit.
        """
        prompt = self._plan(request, on_done)
        self.arrived.append(prompt)
        return prompt

    def cut(self, *prompts: Prompt) -> None:
        """At the next step, hand the samples of these prompts back as they are (PARTIAL)."""
        for prompt in prompts:
            prompt.cut = True

    def cut_all(self) -> None:
        self.cut(*self.arrived, *self.waiting, *(sequence.prompt for sequence in self.active))

    def step(self) -> None:
        """Start what fits, then one token for everybody."""
        while self.arrived:
            self.waiting.append(self.arrived.popleft())
            self.total += self.waiting[-1].request.samples
        self._hand_back()
        self._admit()
        self._decode()

    def _plan(self, request: Request, on_done: OnDone) -> Prompt:
        """How far each sample goes, and what it is then."""
        length, vocabulary, context = len(request.prompt), self.model.vocabulary, self.model.context
        name = f"the prompt of group {request.group}"
        if not length:
            raise ValueError(f"{name} has no tokens")
        if not 0 <= min(request.prompt) <= max(request.prompt) < vocabulary:
            raise ValueError(f"{name} holds a token id outside of 0..{vocabulary - 1}")
        if request.begun and (request.samples > 1 or request.begun >= length):
            raise ValueError(f"{name}: {request.begun} of {length} tokens are begun, of {request.samples} samples")
        limit = self.sampling.max_new_tokens - request.begun if request.limit is None else request.limit
        if context is not None:
            if length >= context:
                raise ValueError(f"{name} has {length} tokens; the model's context is {context}")
            limit = min(limit, context - length)
        if limit < 1:
            raise ValueError(f"{name} leaves no room for a token: {request.begun} are begun, limit is {limit}")
        kv_tokens = self.engine.kv_tokens
        if kv_tokens is not None and length + limit > kv_tokens:
            raise ValueError(
                f"{name} may need {length} + {limit} tokens; native.kv_tokens is {kv_tokens}: raise it or shorten "
                "max_new_tokens"
            )
        if request.pause is not None and request.pause < limit:
            return Prompt(request, request.pause, Status.PARTIAL, on_done)
        return Prompt(request, limit, Status.TRUNCATED, on_done)

    def _hand_back(self) -> None:
        """End what was cut."""
        for prompt in [p for p in self.waiting if p.cut]:
            self.waiting.remove(prompt)
            for place in range(prompt.started, prompt.request.samples):
                self._finish(Active.begin(prompt, place, -1, None), Status.PARTIAL)
        for sequence in [s for s in self.active if s.prompt.cut][::-1]:
            self._vacate(sequence.slot)
            self._finish(sequence, Status.PARTIAL)

    def _reserve(self) -> bool:
        """Room for what waits, as far as memory allows; False if some of what is active has to end before."""
        engine = self.engine
        wanted = len(self.active) + sum(p.waiting for p in self.waiting)
        longest = max(self.longest, *(p.longest for p in self.waiting))
        most = engine.max_sequences if engine.kv_tokens is None else max(1, engine.kv_tokens // longest)
        slots = min(engine.max_sequences, most, max(wanted, self.slots))
        if (slots, longest) == (self.slots, self.longest):
            return True
        if len(self.active) > slots:
            return False
        if self.slots and engine.kv_tokens is None:
            slots = min(engine.max_sequences, int(slots * _MORE)) if slots > self.slots else slots
            longest = int(longest * _MORE) if longest > self.longest else longest
        self._resize(slots, longest)
        return True

    def _resize(self, slots: int, longest: int) -> None:
        """Lay the cache and what else there is for each slot out anew; active sequences stay where they are."""
        self.slots, self.longest = slots, longest
        rows = -(-slots // ROWS) * ROWS  # the surplus holds padding rows; the first position of each is touched
        length = -(-longest // STRIDE) * STRIDE
        active = len(self.active)
        self.cache.resize(rows, length, used=(active, max((s.length for s in self.active), default=0)))
        state, seen = self.state, self.seen
        self.state = state.new_zeros(len(state), rows)
        self.state[:, :active] = state[:, :active]
        if seen is not None:
            self.seen = seen.new_zeros(rows, seen.shape[1])
            self.seen[:active] = seen[:active]

    def _admit(self) -> None:
        """Give free slots to waiting samples, in order; prompts are packed into forwards of prefill_tokens."""
        if not self.waiting or not self._reserve():
            return
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
                if not prompt.waiting:
                    self.waiting.popleft()
            if fresh:
                self._prefill(fresh)
            started = self.active[first:]
            logits = torch.cat([s.prompt.logits for s in started])
            for prompt in (s.prompt for s in started):
                if not prompt.waiting:
                    prompt.logits = prompt.prefix = None
            self._choose(logits, first)

    def _start(self, prompt: Prompt) -> slice:
        """Put as many of the prompt's samples into slots as fit; returns the slots."""
        request = prompt.request
        count = min(prompt.waiting, self.slots - len(self.active))
        slots = slice(len(self.active), len(self.active) + count)
        for place in range(prompt.started, prompt.started + count):
            slot = len(self.active)
            key = stream_key(self.engine.seed, request.group, request.first + place)
            self.state[:, slot] = torch.tensor([0, len(request.prompt) - 1, key])
            if self.seen is not None:
                self.seen[slot] = False
                self.seen[slot, request.prompt] = True
            self.active.append(Active.begin(prompt, place, slot, self._stops(request)))
        prompt.started += count
        return slots

    def _stops(self, request: Request) -> StopFinder | None:
        stop = self.sampling.stop if request.stop is None else request.stop
        if not stop:
            return None
        finder = StopFinder(stop, self.engine.decode)
        for token in request.prompt[len(request.prompt) - request.begun :]:
            finder.push(token)
        return finder

    def _prefill(self, fresh: list[tuple[Prompt, slice]]) -> None:
        """Compute prompts; the keys and values of each go to its slots."""
        tokens, positions, segments, last = [], [], [], []
        for prompt, slots in fresh:
            start = len(tokens)
            tokens += prompt.request.prompt
            positions += range(len(prompt.request.prompt))
            segments.append(Segment(start, len(tokens), slots, prompt.request.begun))
            last.append(len(tokens) - 1)
        padding = [0] * (-len(tokens) % ROWS)
        as_tensor = lambda values: torch.tensor(values, device=self.model.device)  # noqa: E731
        logits = self.model.forward(
            as_tensor(tokens + padding), as_tensor(positions + padding), Prefill(self.cache, segments), as_tensor(last)
        )
        for (prompt, slots), row in zip(fresh, logits.split(1), strict=True):
            prompt.logits, prompt.version = row, self.engine.version
            if prompt.waiting:
                prompt.prefix = self.cache.read(slots.start, len(prompt.request.prompt))

    def _decode(self) -> None:
        """One more token for every active sequence."""
        if not self.active:
            return
        count = len(self.active)
        rows = -(-count // ROWS) * ROWS
        tokens, positions = self.state[TOKEN, :rows], self.state[POSITION, :rows]
        columns = max(s.length for s in self.active)
        logits = self.model.forward(tokens, positions, Decode(self.cache, positions, columns), None)
        self._choose(logits[:count], 0)

    def _choose(self, logits: Tensor, first: int) -> None:
        """Draw the next token of the slots from ``first`` on, and write it down. logits [their number, V]."""
        last = len(self.active)
        state = self.state[:, first:last]
        seen = None if self.seen is None else self.seen[first:last]
        tokens, logprobs = sample(logits, uniforms(state[KEY], state[POSITION] + 1), self.sampling, seen)
        state[TOKEN] = tokens
        state[POSITION] += 1
        if seen is not None:
            seen.scatter_(1, tokens[:, None], True)
        if not bool(logprobs.isfinite().all()):
            bad = (~logprobs.isfinite()).nonzero().flatten().tolist()
            groups = sorted({self.active[first + i].prompt.request.group for i in bad})
            raise FloatingPointError(f"logits are not finite (weights version {self.engine.version}, groups {groups})")
        self.tokens_chosen += last - first
        self._note(first, tokens.tolist(), logprobs.tolist())

    def _note(self, first: int, tokens: list[int], logprobs: list[float]) -> None:
        """Write down the new tokens of the slots from ``first`` on; sequences that have ended leave."""
        ended = []
        for sequence, token, logprob in zip(self.active[first:], tokens, logprobs, strict=True):
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            sequence.versions.append(self.engine.version)
            prompt, stops = sequence.prompt, sequence.stops
            if self.on_token is not None:
                self.on_token(prompt.request.group, prompt.request.first + sequence.place, token)
            if token in self.engine.end_tokens or (stops is not None and stops.push(token)):
                ended.append((sequence, Status.OK))
            elif len(sequence.tokens) == prompt.limit:
                ended.append((sequence, prompt.at_limit))
        for sequence, _ in reversed(ended):  # the last slot first: then what fills a free slot has not ended itself
            self._vacate(sequence.slot)
        for sequence, status in ended:
            self._finish(sequence, status)

    def _finish(self, sequence: Active, status: Status) -> None:
        self.finished += 1
        sequence.prompt.on_done(sequence.place, sequence.response(status))

    def _vacate(self, slot: int) -> None:
        """Move the sequence of the last slot into ``slot``."""
        moved = self.active.pop()
        if moved.slot != slot:
            self.cache.write(slice(slot, slot + 1), self.cache.read(moved.slot, moved.length))
            self.state[:, slot] = self.state[:, moved.slot]
            if self.seen is not None:
                self.seen[slot] = self.seen[moved.slot]
            self.active[slot] = moved
        self.state[:, moved.slot] = 0
        moved.slot = slot
