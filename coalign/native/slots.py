"""The slots of the KV cache and who has them: sequences that are decoded, and conversations between two turns."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from coalign.native.attention import ROWS, STRIDE, KVCache
from coalign.native.model import Model
from coalign.native.request import Active

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
