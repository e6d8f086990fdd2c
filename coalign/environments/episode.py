"""One sample as an environment sees it: a conversation with the policy, kept as a log of tokens.

Calls of plain functions that an event loop can wait for.

The time that an environment takes for itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from coalign.data.messages import Message, parse_tools
from coalign.data.templates import Tools
from coalign.environments.rendering import Rendering
from coalign.types import Status


async def call_in_thread(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """What the function returns or raises, from a thread of its own.

    A thread cannot be stopped: one that nobody waits for any more is left to itself, and ends with the process.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if outcome.done():
            return  # cancelled
        if error is None:
            outcome.set_result(result)
        else:
            outcome.set_exception(error)

    def work() -> None:
        result = error = None
        try:
            result = function(*arguments, **keywords)
        except BaseException as raised:
            error = RuntimeError("StopIteration") if isinstance(raised, StopIteration) else raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name=f"environment:{getattr(function, '__name__', '')}", daemon=True).start()
    return await outcome


class Clock:
    """Runs while nobody waits for the policy, and rings once ``seconds`` are over. On one event loop."""

    def __init__(self, seconds: float, ring: Callable[[], None]) -> None:
        self.seconds = seconds
        self.used = 0.0
        self._ring = ring
        self._pauses = 0
        self._since = 0.0
        self._ended = False
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        if self._ended:
            return
        loop = asyncio.get_running_loop()
        self._since = loop.time()
        self._timer = loop.call_later(max(0.0, self.seconds - self.used), self._ring)

    def end(self) -> None:
        """Stop for good."""
        self.stop()
        self._ended = True

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self.used += asyncio.get_running_loop().time() - self._since

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stands still within; contexts may overlap."""
        self._pauses += 1
        self.stop()
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                self.start()


_EITHER = "between two turns an environment says messages (Episode.say) or writes text (Episode.write), not both"


class PolicyResponse(Protocol):
    """tokens i32[R], logprobs f32[R], versions i32[R], and how they end."""

    tokens: Tensor
    logprobs: Tensor
    versions: Tensor
    status: Status


class Policy(Protocol):
    """Who takes the turns."""

    room: int | None  # tokens of the longest sequence that fits

    async def respond(
        self, tokens: list[int], *, group: int, index: int, opening: int, limit: int, stop: tuple[str, ...] | None
    ) -> PolicyResponse:
        """The answer to ``tokens``, of which the first ``opening`` came before the first turn."""
        ...

    def forget(self, group: int, index: int) -> None:
        """No more turns of this sample."""
        ...

    def decode(self, tokens: Sequence[int], *, special: bool) -> str: ...


class EpisodeOver(RuntimeError):
    """The environment went on with an episode that has been ended from outside (a timeout, or enough others)."""


class NothingLeft(RuntimeError):
    """The environment asked for another turn after one for which no tokens were left. That ends its episode."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What the policy said. ``text`` leaves special tokens out, ``raw`` keeps them.

    OK: it ended by itself. TRUNCATED: by a limit, of this turn, of the episode, or of the context; where nothing was
    left, it has no tokens.
    """

    text: str
    raw: str
    tokens: list[int]
    status: Status


@dataclass(slots=True)
class Log:
    """Columns of a sample, token by token. See coalign.types."""

    tokens: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    rollout_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)

    def add(self, tokens: Sequence[int], logprobs: Sequence[float] = (), versions: Sequence[int] = ()) -> None:
        """Tokens of the policy with their log-probs and versions; without these, tokens that nobody chose."""
        count, chosen = len(tokens), len(logprobs) > 0
        self.tokens += tokens
        self.loss_mask += [chosen] * count
        self.rollout_logprobs += logprobs if chosen else [0.0] * count
        self.versions += versions if chosen else [-1] * count
        self.turn_rewards += [0.0] * count


class Episode:
    """One sample on its way.

    ``row`` is the data set's; ``group`` and ``index`` say which draw and which of its samples this is; ``random`` is a
    generator of its own, the same in every run of the same seed. ``messages`` is the conversation so far as people read
    it, ``log`` the tokens.
    """

    clock: Clock  # of the environment's call that plays this episode

    def __init__(
        self,
        *,
        row: Mapping[str, Any],
        group: int,
        index: int,
        seed: int,
        prompt: Sequence[int],
        max_new_tokens: int,
        policy: Policy,
        rendering: Rendering,
    ) -> None:
        self.row = row
        self.group = group
        self.index = index
        self.seed = seed
        self.random = random.Random(f"{seed}/{group}/{index}")
        self.messages: list[Message] = [*(row.get("messages") or [])]
        self.log = Log()
        self.counts: Counter[str] = Counter()
        self.status = Status.OK
        self.prompt_length = 0
        self._prompt = list(prompt)
        self._render_opening = False  # from the messages; otherwise it is the prompt
        self._tools: Tools | None = parse_tools(row["tools"], "tools") if row.get("tools") else None
        self._said: list[Message] = []  # since the last turn, and not in the log yet
        self._written: list[int] = []  # likewise
        self._answer: list[int] | None = None  # the last turn
        self._left = max_new_tokens
        self._policy, self._rendering = policy, rendering
        self._generating = self._over = False

    # ---- what an environment calls -----------------------------------------------------------------------------------

    def begin(self, messages: Sequence[Message] | None = None, *, tools: Tools | None = None) -> None:
        """Open with other messages than the row's, or show the policy ``tools`` (JSON Schema functions).

        RuntimeError after the first turn.
        """
        if self._answer is not None:
            raise RuntimeError("Episode.begin comes before the first turn; later, messages are added with `say`")
        self.messages = self.messages if messages is None else [*messages]
        self._tools = self._tools if tools is None else tools
        self._render_opening = True

    def say(self, *messages: Message) -> None:
        """The environment's messages (tool results, a user's words), which the policy reads before its next turn.

        Their tokens are not trained on. What the policy does not get to read leaves no tokens. RuntimeError together
        with `write`.
        """
        self._check()
        if self._written:
            raise RuntimeError(_EITHER)
        self.messages += messages
        self._said += messages

    def write(self, text: str) -> None:
        """Add a text as it is, without a chat template; not trained on. RuntimeError together with `say`."""
        self._check()
        if self._said:
            raise RuntimeError(_EITHER)
        self.messages.append({"role": "user", "content": text})
        self._written += self._rendering.text(text)

    async def generate(self, *, max_new_tokens: int | None = None, stop: str | Sequence[str] | None = None) -> Turn:
        """The policy's next turn, of at most ``max_new_tokens``; ``stop``: strings that end it (None: the run's).

        `max_new_tokens` of the run's sampling settings limits all turns together, and the room that there is (in the
        context, the KV cache, a micro-batch) everybody's tokens; once nothing is left there is one empty turn
        (TRUNCATED), then NothingLeft. Raises RenderingError for a template that does not say what messages
        add, ValueError for an opening that leaves no room for a token.
        """
        self._check()
        if self._answer == []:
            raise NothingLeft(f"group {self.group}, index {self.index} has used all its tokens")
        if self._generating:
            raise RuntimeError("an episode generates one turn at a time")
        fresh, before = self._unread(), self._left
        left = self._room(len(fresh))
        turn = Turn("", "", [], Status.TRUNCATED)
        if left > 0:
            self.log.add(fresh)
            self.prompt_length = self.prompt_length or len(fresh)
            limit = left if max_new_tokens is None else min(left, max_new_tokens)
            turn = await self._respond(limit, (stop,) if isinstance(stop, str) else stop)
        elif self._answer is None:
            raise ValueError(f"the opening has {len(fresh)} tokens, and {self._policy.room} fit")
        if turn.status == Status.TRUNCATED and len(turn.tokens) == max(left, 0) < before:
            self.counts["out_of_room"] += 1
        self._said, self._written = [], []
        self.status, self._answer = turn.status, turn.tokens
        self.messages.append({"role": "assistant", "content": turn.text})
        return turn

    def reward(self, value: float) -> None:
        """What the last turn was worth; adds to what it was given before. ValueError for no finite number."""
        if not math.isfinite(value):
            raise ValueError(f"the reward of a turn is {value}; expected a finite number")
        if not any(self.log.loss_mask):
            raise RuntimeError("Episode.reward comes after a turn of the policy")
        last = len(self.log.loss_mask) - 1 - self.log.loss_mask[::-1].index(True)
        self.log.turn_rewards[last] += float(value)

    def count(self, name: str, value: float = 1.0) -> None:
        """Add to a number of this episode; the metric `episode/<name>` is its mean over episodes."""
        self.counts[name] += value

    # ---- what runs it calls ------------------------------------------------------------------------------------------

    def close(self, status: Status | None = None) -> None:
        """Nothing is added any more. ``status``: another than that of the last turn.

        An episode without a turn says nothing about the policy: it is dropped, as one that failed is (`episode/empty`).
        """
        if self._over:
            return
        self._over = True
        self._policy.forget(self.group, self.index)
        self.status = self.status if status is None else status
        if status is None and not any(self.log.loss_mask):
            self.status = Status.ERROR
            self.counts["empty"] += 1
        if not self.log.tokens:
            self.log.add(self._prompt)
        self.prompt_length = self.prompt_length or len(self.log.tokens)

    def _check(self) -> None:
        if self._over:
            raise EpisodeOver(f"group {self.group}, index {self.index} has ended")

    def _room(self, fresh: int) -> int:
        """Tokens that the policy may still choose after ``fresh`` more of others."""
        room = self._policy.room
        return self._left if room is None else min(self._left, room - len(self.log.tokens) - fresh)

    def _unread(self) -> list[int]:
        """The tokens that the policy has not seen: the opening, or what has come since its last turn."""
        if self._answer is not None:
            said = self._rendering.following(self._answer, self._said, self._tools) if self._said else []
        elif self._said or self._render_opening:
            said = self._rendering.opening(self.messages, self._tools)
        else:
            said = self._prompt
        return said + self._written

    async def _respond(self, limit: int, stop: Sequence[str] | None) -> Turn:
        asked = {"group": self.group, "index": self.index, "opening": self.prompt_length, "limit": limit}
        self._generating = True
        try:
            with self.clock.paused():
                answer = await self._policy.respond(
                    list(self.log.tokens), stop=None if stop is None else tuple(stop), **asked
                )
        finally:
            self._generating = False
        self._check()
        self.counts["turns"] += 1
        tokens = answer.tokens.tolist()
        self.log.add(tokens, answer.logprobs.tolist(), answer.versions.tolist())
        self._left -= len(tokens)
        decode = self._policy.decode
        return Turn(decode(tokens, special=False), decode(tokens, special=True), tokens, answer.status)
