"""The embedded generation engine: computes with the trainer's own tensors where it can.

What a token will be depends on the weights and on (seed, group, index, position) only, as far as the arithmetic of this
machine keeps to that: kernels.py chooses it so, and probe.py tests it on every model.

What the embedded engine keeps of a request on its way.

The slots of the KV cache and who has them: sequences that are decoded, and conversations between two turns.

Continuous batching: requests wait, get slots of the KV cache, are decoded together, and leave as they finish.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from coalign.backends.engines.contract import InferenceEngine, OnToken, Run
from coalign.backends.engines.native import model as probe
from coalign.backends.engines.native.attention import ROWS, STRIDE, Decode, KVCache, Prefill, Segment
from coalign.backends.engines.native.model import Model
from coalign.backends.engines.request import Answer, Decoder, OnDone, Prompt, Request
from coalign.backends.engines.sampling import Sampling, sample, stream_key, uniforms
from coalign.types import Status


@dataclass(slots=True, eq=False)
class Queued(Prompt):
    """``started`` of its samples have been given a slot."""

    started: int = 0
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


@dataclass(slots=True, eq=False)
class Active(Answer):
    """One sample in ``slot`` of the KV cache, being decoded or kept."""

    prompt: Queued
    slot: int = -1

    @property
    def length(self) -> int:
        """Tokens in the KV cache or about to be."""
        return len(self.prompt.request.prompt) + len(self.tokens)

    def leads_to(self, prompt: Queued) -> bool:
        """Whether ``prompt`` goes on with this sample from where it is."""
        if self.prompt.sample != prompt.sample or self.prompt.request.opening != prompt.request.opening:
            return False
        return [*self.prompt.request.prompt, *self.tokens] == prompt.request.prompt[: self.length]


# Rows of the state, one column for each slot: the next token to feed, its position, the key of the random stream.
TOKEN, POSITION, KEY = range(3)


class Slots:
    """``count`` slots, for sequences of up to ``longest`` tokens each.

    Active sequences stand in the slots 0..n-1, so that decoding reads them as one block, and kept ones right behind
    them; a slot that becomes free is filled from the end. A kept sequence gives way as soon as its slot is needed.
    """

    def __init__(self, model: Model, *, note_seen: bool, reserve: Callable[[int], None]) -> None:
        self.count = self.longest = 0
        self.cache = KVCache(0, 0, reserve)
        self.state = torch.zeros(3, 0, dtype=torch.int64, device=model.device)
        self.seen: Tensor | None = None  # bool[slots, V]: the tokens that each sequence holds
        if note_seen:
            self.seen = torch.zeros(0, model.vocabulary, dtype=torch.bool, device=model.device)
        self._taken: list[Active] = []  # _taken[i] is in slot i
        self._active = 0

    @property
    def active(self) -> list[Active]:
        return self._taken[: self._active]

    @property
    def kept(self) -> list[Active]:
        return self._taken[self._active :]

    @property
    def free(self) -> int:
        """Slots that a sequence can have; those of kept ones are among them."""
        return self.count - self._active

    def resize(self, count: int, longest: int) -> None:
        """Lay everything out anew; sequences stay where they are, except for kept ones beyond ``count``."""
        while len(self._taken) > count:
            self.remove(self._taken[-1])
        self.count, self.longest = count, longest
        rows = -(-count // ROWS) * ROWS  # the surplus holds padding rows; the first position of each is touched
        length = -(-longest // STRIDE) * STRIDE
        taken = len(self._taken)
        self.cache.resize(rows, length, used=(taken, max((s.length for s in self._taken), default=0)))
        state, seen = self.state, self.seen
        self.state = state.new_zeros(len(state), rows)
        self.state[:, :taken] = state[:, :taken]
        if seen is not None:
            self.seen = seen.new_zeros(rows, seen.shape[1])
            self.seen[:taken] = seen[:taken]

    def add(self, sequence: Active, key: int, kept: Active | None = None) -> None:
        """Make a sequence active whose next token, by the random stream of ``key``, follows its prompt. With ``kept``
        it takes that one's place, keys and values included."""
        slot = self._active
        if kept is not None:
            self._exchange(kept.slot, slot)
        else:
            if len(self._taken) == self.count:
                self.remove(self._taken[-1])
            self._taken.append(sequence)
            self._move(slot, len(self._taken) - 1)
        self._taken[slot], sequence.slot = sequence, slot
        self._active += 1
        prompt = sequence.prompt.request.prompt
        self.state[:, slot] = torch.tensor([0, len(prompt) - 1, key])
        if self.seen is not None:
            self.seen[slot] = False
            self.seen[slot, prompt] = True

    def keep(self, sequence: Active) -> None:
        """It is not decoded any more, but its keys and values stay. Decoding may still touch the position of its last
        token, which has none yet."""
        self._active -= 1
        self._exchange(sequence.slot, self._active)

    def remove(self, sequence: Active) -> None:
        hole, last = sequence.slot, len(self._taken) - 1
        if hole < self._active:
            self._active -= 1
            self._move(self._active, hole)
            hole = self._active
        self._move(last, hole)
        self._taken.pop()
        self.state[:, last] = 0

    def _move(self, slot: int, to: int) -> None:
        """Copy what is in a slot to another one."""
        if slot == to:
            return
        moved = self._taken[slot]
        self.cache.write(slice(to, to + 1), self.cache.read(slot, moved.length))
        self.state[:, to] = self.state[:, slot]
        if self.seen is not None:
            self.seen[to] = self.seen[slot]
        self._taken[to], moved.slot = moved, to

    def _exchange(self, slot: int, other: int) -> None:
        if slot == other:
            return
        moved, state = self._taken[slot], self.state[:, slot].clone()
        tokens = self.cache.read(slot, moved.length)
        seen = None if self.seen is None else self.seen[slot].clone()
        self._move(other, slot)
        self.cache.write(slice(other, other + 1), tokens)
        self.state[:, other] = state
        if self.seen is not None:
            self.seen[other] = seen
        self._taken[other], moved.slot = moved, other


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


log = logging.getLogger(__name__)


class NativeEngine(InferenceEngine):
    """Generates with ``model``. ``is_invariant``, once weights are there: a token has the same bits in any batch.

    seed: of the sampling. max_sequences: decoded at once. kv_tokens: tokens the KV cache may hold (None: enough for
    max_sequences of the longest). prefill_tokens: prompt tokens in one forward (a longer prompt goes alone).
    end_tokens: ids that end a response. decoder: see coalign.backends.engines.request. reserve: hears how many bytes the KV
    cache is about to have, and may raise.
    """

    is_invariant = False

    def __init__(
        self,
        model: Model,
        *,
        seed: int,
        max_sequences: int,
        kv_tokens: int | None,
        prefill_tokens: int,
        end_tokens: Iterable[int],
        decoder: Decoder,
        reserve: Callable[[int], None] = lambda size: None,
    ) -> None:
        super().__init__()
        self.model = model
        self.seed = seed
        self.max_sequences = max_sequences
        self.kv_tokens = kv_tokens
        self.prefill_tokens = prefill_tokens
        self.end_tokens = frozenset(end_tokens)
        self.decoder = decoder
        self.reserve = reserve

    @property
    def weights_dtype(self) -> torch.dtype | None:
        kinds = {tensor.dtype for _, tensor in self.model.weights() if tensor.is_floating_point()}
        return kinds.pop() if len(kinds) == 1 else None

    @contextmanager
    def _run(self, sampling: Sampling, on_token: OnToken | None) -> Iterator[NativeRun]:
        with torch.inference_mode(), self.model.packed():
            try:
                yield NativeRun(self, sampling, on_token)
            finally:
                self.reserve(0)

    def _load(self, weights: Iterable[tuple[str, Tensor]], *, adopt: bool) -> None:
        """Also raises ValueError for an architecture that fails the first probe."""
        self.model.load(weights, adopt=adopt)
        if self.version < 0:
            probe.check_against_transformers(self.model)
            with self.model.packed():
                self.is_invariant = probe.is_invariant(self.model)
            if not self.is_invariant:
                parts = ", ".join(self.model.variant_parts) or "its attention"
                log.warning(
                    "native engine: log-probs of %s may differ in their last bits from one batch to another (%s)",
                    type(self.model.module).__name__,
                    parts,
                )
        if self._running is not None:
            self.model.pack()
