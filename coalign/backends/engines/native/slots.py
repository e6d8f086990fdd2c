"""The slots of the KV cache: which sequence has which, and the state of the requests that wait for one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from coalign.backends.engines.native.attention import EXPERTS, ROWS, STRIDE, KVCache
from coalign.backends.engines.native.model import NativeModel
from coalign.backends.engines.request import PartialResponse, SubmittedRequest
from coalign.types import UNKNOWN_EXPERT

# Rows of the state, one column for each slot: the next token to feed, its position, the key of the random stream.
TOKEN, POSITION, KEY = range(3)


@dataclass(slots=True, eq=False)
class QueuedRequest(SubmittedRequest):
    """A request whose started samples have slots."""

    # Results of the prefill with the weights of ``version``, kept while samples wait for a slot.
    version: int | None = None
    logits: Tensor | None = None  # f32[1, V] after the prompt
    prefix: list[Tensor] | None = None  # keys and values


@dataclass(slots=True, eq=False)
class ActiveSequence(PartialResponse):
    """One sample in ``slot`` of the KV cache, being decoded or kept for its next turn."""

    submitted: QueuedRequest
    slot: int = -1

    @property
    def length(self) -> int:
        """Tokens in the KV cache or about to be."""
        return len(self.submitted.request.prompt) + len(self.tokens)

    def is_continued_by(self, queued: QueuedRequest) -> bool:
        """Whether ``queued`` is the next turn of this conversation."""
        own, other = self.submitted.request, queued.request
        if self.submitted.sample != queued.sample or own.first_turn != other.first_turn:
            return False
        return [*own.prompt, *self.tokens] == other.prompt[: self.length]


class SequenceSlots:
    """Assigns ``count`` slots of the KV cache to sequences of up to ``longest`` tokens each.

    Active sequences have the slots 0..n-1, so that decoding reads them as one block. Sequences kept between two turns
    come right after them. A slot that becomes free is filled from the end. A kept sequence is dropped as soon as its
    slot is needed.
    """

    def __init__(self, model: NativeModel, *, note_seen: bool, reserve: Callable[[int], None]) -> None:
        self.count = self.longest = 0
        self.cache = KVCache(0, 0, reserve)
        self.state = torch.zeros(3, 0, dtype=torch.int64, device=model.device)
        self.seen: Tensor | None = None  # bool[slots, V]: the tokens that each sequence holds
        if note_seen:
            self.seen = torch.zeros(0, model.vocabulary, dtype=torch.bool, device=model.device)
        self._taken: list[ActiveSequence] = []  # _taken[i] is in slot i
        self._active = 0

    @property
    def active(self) -> list[ActiveSequence]:
        return self._taken[: self._active]

    @property
    def kept(self) -> list[ActiveSequence]:
        return self._taken[self._active :]

    @property
    def free(self) -> int:
        """Slots that a new sequence can have, including those of kept sequences."""
        return self.count - self._active

    def resize(self, count: int, longest: int) -> None:
        """Reallocate; sequences stay in their slots, except for kept ones beyond ``count``, which are dropped."""
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

    def add(self, sequence: ActiveSequence, key: int, kept: ActiveSequence | None = None) -> None:
        """Make a sequence active; its next token follows its prompt and is drawn with the random stream of ``key``.

        It takes over the slot of ``kept``, keys and values included, if that is given.
        """
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
        prompt = sequence.submitted.request.prompt
        self.state[:, slot] = torch.tensor([0, len(prompt) - 1, key])
        if self.seen is not None:
            self.seen[slot] = False
            self.seen[slot, prompt] = True

    def note_experts(self, sequence: ActiveSequence) -> None:
        """Keep the experts of a sequence beyond its time in a slot, if they are recorded; not of its last token."""
        if found := self.cache.layers.get(EXPERTS):
            known = found[0][sequence.slot, : sequence.length - 1].cpu()
            sequence.experts = F.pad(known, (0, 0, 0, 0, 0, 1), value=UNKNOWN_EXPERT)

    def keep(self, sequence: ActiveSequence) -> None:
        """Stop decoding a sequence, but keep its keys and values.

        Decoding may still write to the position of its last token, which has no keys and values yet.
        """
        self._active -= 1
        self._exchange(sequence.slot, self._active)

    def remove(self, sequence: ActiveSequence) -> None:
        hole, last = sequence.slot, len(self._taken) - 1
        if hole < self._active:
            self._active -= 1
            self._move(self._active, hole)
            hole = self._active
        self._move(last, hole)
        self._taken.pop()
        self.state[:, last] = 0

    def _move(self, slot: int, to: int) -> None:
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
        if self.seen is not None and seen is not None:
            self.seen[other] = seen
        self._taken[other], moved.slot = moved, other
