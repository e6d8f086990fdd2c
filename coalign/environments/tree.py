"""The turns of one episode as a tree of tokens, whatever its program asks, and the rows to train on.

A turn's path, from its root, is exactly what the policy had read and sampled when the turn ended. A request goes on
behind the turn that its messages repeat, so sampled tokens never pass through text. A request that repeats no turn is
rendered anew, and still goes on behind a turn if its tokens begin with that turn's path. Anything else is a new root.
So every row is exact by construction: to compare messages only makes rows fewer.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from coalign.data.messages import Message
from coalign.data.templates import Tools
from coalign.types import ImageSpan, Status


@dataclass(eq=False, slots=True)
class Turn:
    """One turn of the policy: the tokens that were ``added`` behind its ``parent``, and the ``tokens`` sampled then.

    ``text`` leaves special tokens out, ``raw`` keeps them. ``status`` is OK if the turn ended by itself, TRUNCATED if
    it reached a limit of this turn, the episode or the context. With no tokens left it is empty. ``images`` stand in
    ``added``. ``label`` says whose turn it is; one that is not ``trained`` is context of others, or nothing.
    """

    text: str
    raw: str
    tokens: list[int]
    status: Status
    number: int = 0  # in the order in which the turns of the episode ended
    parent: Turn | None = None
    added: list[int] = field(default_factory=list)
    images: tuple[ImageSpan, ...] = ()
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    experts: Tensor | None = None  # those that computed the whole path; see coalign.types.Response
    stream: int = 0  # number of its stream of random numbers within the episode
    state: int = 0  # the state in which it begins, as a number other than 0
    label: str = ""
    trained: bool = True
    reward: float = 0.0
    messages: Sequence[Message] = ()  # those that it was asked with, and its answer once it is remembered
    tools: Tools | None = None
    start: int = 0  # tokens before its own, in its path
    digest: bytes = b""  # hash of its path's tokens

    @property
    def path(self) -> list[Turn]:
        """The turns from its root to it."""
        turns: list[Turn] = [self]
        while (earlier := turns[-1].parent) is not None:
            turns.append(earlier)
        return turns[::-1]

    @property
    def path_tokens(self) -> list[int]:
        """What the policy has read and sampled when the turn ends."""
        return [token for turn in self.path for token in (*turn.added, *turn.tokens)]


ROW_COLUMNS = ("tokens", "loss_mask", "rollout_logprobs", "versions", "turn_rewards", "turn_states")


@dataclass(slots=True)
class EpisodeRow:
    """One row of an episode: ROW_COLUMNS have an entry for each token; see coalign.types."""

    tokens: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    rollout_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    turn_states: list[int] = field(default_factory=list)
    images: list[ImageSpan] = field(default_factory=list)
    prompt_length: int = 0
    leaf: Turn | None = None

    def add(self, turn: Turn, *, trained: bool) -> None:
        """Add the tokens before a turn, and its own. One that is ``trained`` elsewhere, or not at all, is context."""
        start, before, count = len(self.tokens), len(turn.added), len(turn.tokens)
        self.images += [replace(span, start=span.start + start) for span in turn.images]
        self.prompt_length = self.prompt_length or before
        self.tokens += turn.added + turn.tokens
        self.loss_mask += [False] * before + [trained] * count
        self.rollout_logprobs += [0.0] * before + turn.logprobs
        self.versions += [-1] * before + turn.versions
        self.turn_rewards += [0.0] * (before + count)
        self.turn_states += [0] * (before + count)
        if trained and count:
            self.turn_rewards[-1], self.turn_states[start + before] = turn.reward, turn.state
        self.leaf = turn


class TurnTree:
    """The turns of an episode, in the order in which they ended."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.asked: Counter[tuple[Any, ...]] = Counter()
        self._by_messages: dict[bytes, list[Turn]] = defaultdict(list)
        self._by_tokens: dict[tuple[int, bytes], Turn] = {}

    def add(self, turn: Turn) -> None:
        """Add a turn that has ended, and number it."""
        path = turn.path_tokens
        turn.number, turn.start = len(self.turns), len(path) - len(turn.tokens)
        self.turns.append(turn)
        key = _, turn.digest = _hash_tokens(path)
        self._by_tokens[key] = turn

    def remember(self, turn: Turn, answer: Message) -> None:
        """Let a turn be found by the messages that it was asked with, and its ``answer`` behind them."""
        turn.messages = [*turn.messages, answer]
        *_, key = _chain(turn.tools, turn.messages)
        self._by_messages[key].append(turn)

    def find(self, tools: Tools | None, messages: Sequence[Message]) -> tuple[Turn | None, int]:
        """Find the latest turn that the messages repeat up to its answer, and how many of them that takes.

        What follows holds no answer of somebody else: how a template renders those is no difference.
        """
        keys = list(_chain(tools, messages))
        last = next((i for i in range(len(messages) - 1, -1, -1) if messages[i]["role"] == "assistant"), None)
        if last is None or not (turns := self._by_messages.get(keys[last + 1])):
            return None, 0
        ids = _list_call_ids(messages[last])
        same = (turn for turn in reversed(turns) if ids and _list_call_ids(turn.messages[-1]) == ids)
        return next(same, turns[-1]), last + 1

    def find_by_tokens(self, prompt: list[int]) -> Turn | None:
        """Find the turn with the longest path that ``prompt`` begins with, and goes beyond."""
        best, done, digest = None, 0, hashlib.blake2b(digest_size=16)
        for length in sorted({length for length, _ in self._by_tokens if length < len(prompt)}):
            digest.update(array("q", prompt[done:length]).tobytes())
            done, best = length, self._by_tokens.get((length, digest.digest()), best)
        return best

    def count_asked(self, parent: Turn | None, added: list[int]) -> int:
        """Count a request for an answer to ``added`` tokens behind ``parent``; return how often it was asked before."""
        key = (id(parent), *_hash_tokens(added))
        self.asked[key] += 1
        return self.asked[key] - 1

    def rows(self) -> list[EpisodeRow]:
        """Build a row for each trained turn that no trained one follows: the fewest that hold all of them.

        Each turn is trained in the first row that has it. The first row is the main conversation's. The order of the
        others follows from their tokens, not from which turn ended first, which differs from run to run.
        """
        inner = {earlier for turn in self.turns if turn.trained for earlier in turn.path[:-1]}
        owned: set[Turn] = set()
        rows = []
        leaves = [turn for turn in self.turns if turn.trained and turn not in inner]
        for leaf in sorted(
            leaves, key=lambda leaf: [(turn.stream != 0, turn.added, turn.stream) for turn in leaf.path]
        ):
            row = EpisodeRow()
            for turn in leaf.path:
                row.add(turn, trained=turn.trained and turn not in owned)
                owned.add(turn)
            rows.append(row)
        return rows


def _chain(tools: Tools | None, messages: Sequence[Message]) -> Iterator[bytes]:
    """Yield keys of the conversations that end after 0, 1, 2, … messages. Tools are part of the prompt, so of a key."""
    key = _hash(json.dumps(tools, sort_keys=True).encode())
    yield key
    for message in messages:
        key = _hash(key + _canonical(message).encode())
        yield key


def _canonical(message: Message) -> str:
    """Write down what has to be equal in two messages.

    Of an answer that is its text without margins, and the names and arguments of its calls. Ids of calls, reasoning and
    the fields that clients add or drop are no part of it.
    """
    content = message.get("content") or ""
    if isinstance(content, str):
        content = content.strip() if message["role"] == "assistant" else content
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
    return json.dumps([message["role"], content, calls], sort_keys=True, default=str)


def _list_call_ids(message: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(call.get("id")) for call in message.get("tool_calls") or [])


def _hash_tokens(tokens: Sequence[int]) -> tuple[int, bytes]:
    return len(tokens), _hash(array("q", tokens).tobytes())


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
