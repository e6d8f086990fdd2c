"""Continuous batching: requests wait, get slots of the KV cache, are decoded together, and leave as they finish."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coalign.generation.engine import OnToken, Run
from coalign.generation.request import OnDone, Request
from coalign.generation.sampling import Sampling, sample, stream_key, uniforms
from coalign.native.attention import ROWS, Decode, Prefill, Segment
from coalign.native.request import Active, Queued
from coalign.native.slots import KEY, POSITION, TOKEN, Slots
from coalign.types import Status

if TYPE_CHECKING:
    from coalign.native.engine import NativeEngine

_MORE = 5 / 4  # by which the cache grows at least, so that it does not grow at every step


class NativeRun(Run):
    """What the engine is working on.

    The KV cache is laid out for the longest sequence so far, for as many slots as the engine's kv_tokens allow of that;
    a request that needs longer ones waits until no more than that are active. Between two turns a conversation keeps
    its slot as long as nobody needs it and the weights stay; then a turn prefills what is new. Otherwise it prefills
    everything, to the same bits.
    """

    def __init__(self, engine: NativeEngine, sampling: Sampling, on_token: OnToken | None = None) -> None:
        bounds = [bound for bound in (engine.model.context, engine.kv_tokens) if bound is not None]
        super().__init__(min(bounds) if bounds else None)
        self.engine = engine
        self.model = engine.model
        self.sampling = sampling
        self.on_token = on_token
        self.arrived: deque[Queued] = deque()
        self.waiting: deque[Queued] = deque()
        self.over: deque[tuple[int, int]] = deque()  # conversations that have ended
        self.slots = Slots(self.model, note_seen=sampling.repetition_penalty != 1, reserve=engine.reserve)

    @property
    def unfinished(self) -> bool:
        return bool(self.arrived or self.waiting or self.slots.active)

    def submit(self, request: Request, on_done: OnDone) -> Queued:
        model, kv_tokens = self.model, self.engine.kv_tokens
        prompt = Queued.plan(request, self.sampling, on_done, vocabulary=model.vocabulary, context=model.context)
        if kv_tokens is not None and prompt.longest > kv_tokens:
            raise ValueError(
                f"the prompt of group {request.group} may need {len(request.prompt)} + {prompt.limit} tokens; "
                f"native.kv_tokens is {kv_tokens}: raise it or shorten max_new_tokens"
            )
        self.arrived.append(prompt)
        return prompt

    def cut_all(self) -> None:
        self.cut(*self.arrived, *self.waiting, *(sequence.prompt for sequence in self.slots.active))

    def forget(self, group: int, index: int) -> None:
        self.over.append((group, index))

    def step(self) -> None:
        self._forget()
        while self.arrived:
            prompt = self.arrived.popleft()
            self.total += prompt.request.samples
            if self._kept(prompt) is None:
                self.waiting.append(prompt)
            else:
                self.waiting.appendleft(prompt)  # before somebody else is given its slot
        self._hand_back()
        self._admit()
        self._decode()

    def _hand_back(self) -> None:
        """End what was cut."""
        for prompt in [p for p in self.waiting if p.cut]:
            self.waiting.remove(prompt)
            for place in range(prompt.started, prompt.request.samples):
                self._finish(Active(prompt, place, None), Status.PARTIAL)
        for sequence in [s for s in self.slots.active if s.prompt.cut]:
            self.slots.remove(sequence)
            self._finish(sequence, Status.PARTIAL)

    def _forget(self) -> None:
        """Keep nothing of conversations that are over, nor what other weights have computed."""
        over = {self.over.popleft() for _ in range(len(self.over))}
        for sequence in self.slots.kept:
            if sequence.prompt.sample in over or sequence.versions[-1] != self.engine.version:
                self.slots.remove(sequence)

    def _reserve(self) -> bool:
        """Room for what waits, as far as memory allows; False if some of what is active has to end before."""
        engine, slots = self.engine, self.slots
        going_on = {prompt.sample for prompt in self.waiting}
        kept = sum(sequence.prompt.sample not in going_on for sequence in slots.kept)
        wanted = len(slots.active) + kept + sum(p.waiting for p in self.waiting)
        longest = max(slots.longest, *(p.longest for p in self.waiting))
        most = engine.max_sequences if engine.kv_tokens is None else max(1, engine.kv_tokens // longest)
        count = min(engine.max_sequences, most, max(wanted, slots.count))
        if (count, longest) == (slots.count, slots.longest):
            return True
        if len(slots.active) > count:
            return False
        if slots.count and engine.kv_tokens is None:
            count = min(engine.max_sequences, int(count * _MORE)) if count > slots.count else count
            longest = int(longest * _MORE) if longest > slots.longest else longest
        slots.resize(count, longest)
        return True

    def _admit(self) -> None:
        """Give free slots to waiting samples, in order; prompts are packed into forwards of prefill_tokens."""
        if not self.waiting or not self._reserve():
            return
        while self.waiting and self.slots.free:
            first, filled, fresh = len(self.slots.active), 0, []
            while self.waiting and self.slots.free:
                prompt = self.waiting[0]
                known = prompt.version == self.engine.version
                kept = self._kept(prompt)
                past = 0 if kept is None else kept.length - 1  # its last token was chosen, but never fed
                filled += 0 if known else len(prompt.request.prompt) - past
                if fresh and filled > self.engine.prefill_tokens:
                    break
                slots = self._start(prompt, kept)
                if known:
                    self.slots.cache.write(slots, prompt.prefix)
                else:
                    fresh.append((prompt, slots, past))
                if not prompt.waiting:
                    self.waiting.popleft()
            if fresh:
                self._prefill(fresh)
            started = self.slots.active[first:]
            logits = torch.cat([s.prompt.logits for s in started])
            for prompt in (s.prompt for s in started):
                if not prompt.waiting:
                    prompt.logits = prompt.prefix = None
            self._choose(logits, first)

    def _kept(self, prompt: Queued) -> Active | None:
        """The conversation's last turn, if its keys and values are still there."""
        if prompt.request.opening is None:
            return None
        return next((s for s in self.slots.kept if s.leads_to(prompt)), None)

    def _start(self, prompt: Queued, kept: Active | None) -> slice:
        """Put as many of the prompt's samples into slots as fit; returns the slots."""
        request, first = prompt.request, len(self.slots.active)
        count = min(prompt.waiting, self.slots.free)
        for place in range(prompt.started, prompt.started + count):
            key = stream_key(self.engine.seed, request.group, request.first + place)
            stops = prompt.stops(self.sampling, self.engine.decoder)
            self.slots.add(Active(prompt, place, stops), key, kept)
        prompt.started += count
        return slice(first, first + count)

    def _prefill(self, fresh: list[tuple[Queued, slice, int]]) -> None:
        """Compute prompts, each without so many of its tokens; keys and values go to its slots."""
        tokens, positions, segments, last = [], [], [], []
        for prompt, slots, past in fresh:
            start, request = len(tokens), prompt.request
            tokens += request.prompt[past:]
            positions += range(past, len(request.prompt))
            decoded = min(request.decoded, len(tokens) - start)
            segments.append(Segment(start, len(tokens), slots, decoded, past))
            last.append(len(tokens) - 1)
            self.tokens_kept += past
        self.tokens_prefilled += len(tokens)
        padding = [0] * (-len(tokens) % ROWS)
        as_tensor = lambda values: torch.tensor(values, device=self.model.device)  # noqa: E731
        logits = self.model.forward(
            as_tensor(tokens + padding),
            as_tensor(positions + padding),
            Prefill(self.slots.cache, segments),
            as_tensor(last),
        )
        for (prompt, slots, _), row in zip(fresh, logits.split(1), strict=True):
            prompt.logits, prompt.version = row, self.engine.version
            if prompt.waiting:
                prompt.prefix = self.slots.cache.read(slots.start, len(prompt.request.prompt))

    def _decode(self) -> None:
        """One more token for every active sequence."""
        active = self.slots.active
        if not active:
            return
        rows = -(-len(active) // ROWS) * ROWS
        tokens, positions = self.slots.state[TOKEN, :rows], self.slots.state[POSITION, :rows]
        columns = max(s.length for s in active)
        logits = self.model.forward(tokens, positions, Decode(self.slots.cache, positions, columns), None)
        self._choose(logits[: len(active)], 0)

    def _choose(self, logits: Tensor, first: int) -> None:
        """Draw the next token of the slots from ``first`` on, and write it down. logits [their number, V]."""
        sequences = self.slots.active[first:]
        here = slice(first, first + len(sequences))
        state = self.slots.state[:, here]
        seen = None if self.slots.seen is None else self.slots.seen[here]
        tokens, logprobs = sample(logits, uniforms(state[KEY], state[POSITION] + 1), self.sampling, seen)
        state[TOKEN] = tokens
        state[POSITION] += 1
        if seen is not None:
            seen.scatter_(1, tokens[:, None], True)
        if not bool(logprobs.isfinite().all()):
            bad = (~logprobs.isfinite()).nonzero().flatten().tolist()
            groups = sorted({sequences[i].prompt.request.group for i in bad})
            raise FloatingPointError(f"logits are not finite (weights version {self.engine.version}, groups {groups})")
        self.tokens_chosen += len(sequences)
        self._note(sequences, tokens.tolist(), logprobs.tolist())

    def _note(self, sequences: list[Active], tokens: list[int], logprobs: list[float]) -> None:
        """Write down the new tokens; sequences that have ended leave."""
        ended = []
        for sequence, token, logprob in zip(sequences, tokens, logprobs, strict=True):
            status = sequence.add(token, logprob, self.engine.version, self.engine.end_tokens)
            if self.on_token is not None:
                request = sequence.prompt.request
                self.on_token(request.group, request.first + sequence.place, token)
            if status is not None:
                ended.append((sequence, status))
        for sequence, _ in reversed(ended):  # the last slot first: then what fills a free one has not ended itself
            self._leave(sequence)
        for sequence, status in ended:
            self._finish(sequence, status)

    def _leave(self, sequence: Active) -> None:
        """Give the slot back, or keep it if there may be another turn, for which all has to be of the same weights."""
        if sequence.prompt.request.opening is not None and set(sequence.versions) == {self.engine.version}:
            self.slots.keep(sequence)
        else:
            self.slots.remove(sequence)

    def _finish(self, sequence: Active, status: Status) -> None:
        self.finished += 1
        sequence.prompt.on_done(sequence.place, sequence.response(status))
