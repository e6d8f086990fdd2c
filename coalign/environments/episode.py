"""One sample of an environment: a conversation with the policy, kept as a log of tokens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Protocol, TypeVar

from coalign.data.examples import KEEPS_SPECIAL_TOKENS
from coalign.data.messages import Message, parse_tools
from coalign.data.templates import Tools
from coalign.environments.rendering import Rendering
from coalign.services import PATIENCE, ServiceError, call_service
from coalign.types import ImageSpan, Response, Status

Answer = TypeVar("Answer")


class EnvironmentClock:
    """Measures the time that an environment takes between the policy's turns, and calls ``ring`` after ``seconds``."""

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
        """Pause the clock within; contexts may overlap."""
        self._pauses += 1
        self.stop()
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                self.start()


_NOT_BOTH = "between two turns an environment says messages (Episode.say) or writes text (Episode.write), not both"


class _EpisodePolicy(Protocol):
    """Generates the turns of episodes."""

    capacity: int | None  # tokens of the longest sequence that fits; None: unlimited

    async def respond(
        self,
        tokens: list[int],
        *,
        group: int,
        index: int,
        prompt_length: int,
        limit: int,
        stop: tuple[str, ...] | None,
        restarts: int,
        images: tuple[ImageSpan, ...],
    ) -> Response:
        """Generate the continuation of ``tokens``, of which the first ``prompt_length`` precede the first turn.

        ``restarts`` counts how often these tokens replaced those of earlier turns. ``images`` stand in the tokens.
        """
        ...

    def forget(self, group: int, index: int) -> None:
        """No more turns of this sample will follow."""
        ...

    def decode(self, tokens: Sequence[int], *, special: bool) -> str: ...


class _EpisodeOver(RuntimeError):
    """The environment continued an episode that was ended from outside (a timeout, or enough complete groups)."""


class OutOfTokens(RuntimeError):
    """The environment asked for another turn after an empty one. That ends its episode."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the policy. ``text`` leaves special tokens out, ``raw`` keeps them.

    ``status`` is OK if the turn ended by itself, TRUNCATED if it reached a limit of this turn, the episode or the
    context. With no tokens left it is empty.
    """

    text: str
    raw: str
    tokens: list[int]
    status: Status


@dataclass(slots=True)
class EpisodeLog:
    """The columns of a sample, one entry for each token. See coalign.types."""

    tokens: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    rollout_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    turn_states: list[int] = field(default_factory=list)

    def add(self, tokens: Sequence[int], logprobs: Sequence[float] = (), versions: Sequence[int] = ()) -> None:
        """Add the policy's tokens with their log-probs and versions; without those, tokens that nobody sampled."""
        count, chosen = len(tokens), len(logprobs) > 0
        self.tokens += tokens
        self.loss_mask += [chosen] * count
        self.rollout_logprobs += logprobs if chosen else [0.0] * count
        self.versions += versions if chosen else [-1] * count
        self.turn_rewards += [0.0] * count
        self.turn_states += [0] * count


class Episode:
    """One sample while it is played.

    ``row`` is the data set's row; ``group`` and ``index`` say which draw and which of its samples this is. ``random``
    is this episode's own generator, the same in every run of the same seed. ``messages`` is the conversation so far as
    people read it, ``log`` its tokens, ``images`` where images stand in these.
    """

    clock: EnvironmentClock  # shared by all episodes of a call of the environment

    def __init__(
        self,
        *,
        row: Mapping[str, Any],
        group: int,
        index: int,
        seed: int,
        prompt: Sequence[int],
        max_new_tokens: int,
        policy: _EpisodePolicy,
        rendering: Rendering,
        images: Sequence[ImageSpan] = (),
    ) -> None:
        self.row = row
        self.group = group
        self.index = index
        self.seed = seed
        self.random = random.Random(f"{seed}/{group}/{index}")
        self.messages: list[Message] = [*(row.get("messages") or [])]
        self.log = EpisodeLog()
        self.images: list[ImageSpan] = []
        self.counts: Counter[str] = Counter()
        self.status = Status.OK
        self.prompt_length = 0
        self._prompt, self._prompt_images = list(prompt), tuple(images)
        self._render_prompt = False  # from the messages; otherwise the tokens of `prompt` are used
        self.tools: Tools | None = parse_tools(row["tools"], "tools") if row.get("tools") else None
        self._new_messages: list[Message] = []  # since the last turn, not in the log yet
        self._new_tokens: list[int] = []  # since the last turn, not in the log yet
        self._answer: list[int] | None = None  # tokens of the last turn
        self._anchor: str | None = None  # name of the state before the next turn, if the environment gives one
        self._left = max_new_tokens
        self._restarts = 0  # how often `data.reasoning` restarted the log
        self._policy, self._rendering = policy, rendering
        self._generating = self._over = False

    # ---- for environments --------------------------------------------------------------------------------------------

    async def call_service(self, call: Callable[[], Awaitable[Answer]], patience: float = PATIENCE) -> Answer:
        """Await ``call()``, and repeat it for ``patience`` seconds while it raises ServiceError.

        The pauses and repetitions do not count as the environment's time. Each failure is counted in
        `episode/service_failures`. Raises the last ServiceError, which drops the episode.
        """

        async def attempt() -> Answer:
            try:
                return await call()
            except ServiceError:
                self.count("service_failures")
                raise

        try:
            return await attempt()
        except ServiceError:
            with self.clock.paused():
                return await call_service(attempt, patience)

    def begin(self, messages: Sequence[Message] | None = None, *, tools: Tools | None = None) -> None:
        """Replace the row's messages before the first turn, or show the policy ``tools`` (JSON Schema functions).

        Special tokens that these spell are tokens if the row's source has `keep_special_tokens`, else text.
        Raises RuntimeError after the first turn.
        """
        if self._answer is not None:
            raise RuntimeError("Episode.begin comes before the first turn; later, messages are added with `say`")
        self.messages = self.messages if messages is None else self._rendering.read_messages(messages)
        self.tools = self.tools if tools is None else tools
        self._render_prompt = True

    def say(self, *messages: Message) -> None:
        """Add the environment's messages (tool results, a user's words), which the policy reads before its next turn.

        Contents may hold images, as parts of any of the usual forms, in a run that reads them. Tokens of messages are
        not trained on. Messages after the last turn leave no tokens. RuntimeError together with `write`. Special tokens
        that they spell stay text, and are counted in `episode/markers`.
        """
        self._check_open()
        if self._new_tokens:
            raise RuntimeError(_NOT_BOTH)
        self._count_spelled(messages)
        read = self._rendering.read_messages(messages)
        self.messages += read
        self._new_messages += read

    def write(self, text: str) -> None:
        """Add plain text without a chat template; not trained on. RuntimeError together with `say`.

        Special tokens that it spells stay text, and are counted, as in messages.
        """
        self._check_open()
        if self._new_messages:
            raise RuntimeError(_NOT_BOTH)
        self._count_spelled(text)
        self.messages.append({"role": "user", "content": text})
        self._new_tokens += self._rendering.guard.read(text)

    async def generate(self, *, max_new_tokens: int | None = None, stop: str | Sequence[str] | None = None) -> Turn:
        """The policy's next turn, of at most ``max_new_tokens``.

        ``stop``: strings that end it (None: those of the run).

        Where `data.reasoning` drops the reasoning of earlier turns, the log restarts: earlier turns, without their
        reasoning, become part of the prompt, and lose their rewards (counted in `episode/rewritten`).

        The run's `max_new_tokens` limits all turns together, and the capacity (of the context, the KV cache, a
        micro-batch) limits all tokens. Without tokens left, there is one empty turn (TRUNCATED), and after it
        OutOfTokens is raised. Raises RenderingError if the chat template does not define what messages add, ValueError
        if the prompt leaves no tokens for a first turn.
        """
        self._check_open()
        if self._answer == []:
            raise OutOfTokens(f"group {self.group}, index {self.index} has used all its tokens")
        if self._generating:
            raise RuntimeError("an episode generates one turn at a time")
        anew = self._answer is not None and self._rendering.rewrites(self._new_messages)
        (fresh, images), budget = self._unread(anew), self._left
        left = self._tokens_left(len(fresh) + (0 if anew else len(self.log.tokens)))
        turn = Turn("", "", [], Status.TRUNCATED)
        if left > 0:
            if anew:
                self.log, self.images, self.prompt_length = EpisodeLog(), [], 0
                self._restarts += 1
                self.counts["rewritten"] += 1
            self.images += [replace(span, start=span.start + len(self.log.tokens)) for span in images]
            self.log.add(fresh)
            self.prompt_length = self.prompt_length or len(fresh)
            limit = left if max_new_tokens is None else min(left, max_new_tokens)
            said = self._new_messages or self._new_tokens if self._answer is not None else None
            state = json.dumps(said or self.messages, sort_keys=True, default=str)
            turn = await self._respond(limit, (stop,) if isinstance(stop, str) else stop)
            if turn.tokens:
                self.log.turn_states[-len(turn.tokens)] = _number_state(state if self._anchor is None else self._anchor)
        elif self._answer is None:
            raise ValueError(f"the prompt has {len(fresh)} tokens, and {self._policy.capacity} fit")
        if turn.status == Status.TRUNCATED and len(turn.tokens) == max(left, 0) < budget:
            self.counts["out_of_room"] += 1
        self._new_messages, self._new_tokens, self._anchor = [], [], None
        self.status, self._answer = turn.status, turn.tokens
        self.messages.append({"role": "assistant", "content": turn.text})
        return turn

    def reward(self, value: float) -> None:
        """Add to the reward of the last turn. ValueError for a value that is not finite."""
        if not math.isfinite(value):
            raise ValueError(f"the reward of a turn is {value}; expected a finite number")
        if not any(self.log.loss_mask):
            raise RuntimeError("Episode.reward comes after a turn of the policy")
        last = len(self.log.loss_mask) - 1 - self.log.loss_mask[::-1].index(True)
        self.log.turn_rewards[last] += float(value)

    def anchor(self, state: str) -> None:
        """Name the state in which the next turn begins, for recipes that compare turns of one state (`gigpo`).

        Without it the state is the text that the policy reads before the turn: the prompt, or the messages since its
        last turn.
        """
        self._anchor = state

    def count(self, name: str, value: float = 1.0) -> None:
        """Add to a count of this episode; the metric `episode/<name>` is its mean over episodes."""
        self.counts[name] += value  # pyright: ignore[reportArgumentType]  (Counter adds floats too; its stubs say int)

    # ---- for the runner ----------------------------------------------------------------------------------------------

    def close(self, status: Status | None = None) -> None:
        """End the episode, with ``status`` in place of the last turn's if given.

        An episode without a turn is dropped like a failed one (status ERROR) and counted in `episode/empty`.
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
            self.images = [*self._prompt_images]
        self.prompt_length = self.prompt_length or len(self.log.tokens)

    def _count_spelled(self, content: Any) -> None:
        if self._rendering.guard.is_spelled(content):
            self.counts["markers"] += 1

    def _check_open(self) -> None:
        if self._over:
            raise _EpisodeOver(f"group {self.group}, index {self.index} has ended")

    def _tokens_left(self, context: int) -> int:
        """Tokens that the policy may still sample after a ``context`` of so many."""
        capacity = self._policy.capacity
        return self._left if capacity is None else min(self._left, capacity - context)

    def _unread(self, anew: bool) -> tuple[list[int], Sequence[ImageSpan]]:
        """Return the tokens that the policy has not read (the prompt, or those since its last turn), and their images.

        ``anew``: render the whole conversation as a prompt.
        """
        tokens, images = self._prompt, self._prompt_images
        if self._answer is not None and not anew:
            tokens, images = [], ()
            if self._new_messages:
                tokens, images = self._rendering.render_messages(self._answer, self._new_messages, self.tools)
        elif anew or self._new_messages or self._render_prompt:
            keep = KEEPS_SPECIAL_TOKENS in self.row
            tokens, images = self._rendering.render_prompt(self.messages, self.tools, keep)
        return tokens + self._new_tokens, images

    async def _respond(self, limit: int, stop: Sequence[str] | None) -> Turn:
        self._generating = True
        try:
            with self.clock.paused():
                answer = await self._policy.respond(
                    list(self.log.tokens),
                    group=self.group,
                    index=self.index,
                    prompt_length=self.prompt_length,
                    limit=limit,
                    stop=None if stop is None else tuple(stop),
                    restarts=self._restarts,
                    images=tuple(self.images),
                )
        finally:
            self._generating = False
        self._check_open()
        self.counts["turns"] += 1
        tokens = answer.tokens.tolist()
        self.log.add(tokens, answer.logprobs.tolist(), answer.versions.tolist())
        self._left -= len(tokens)
        decode = self._policy.decode
        return Turn(decode(tokens, special=False), decode(tokens, special=True), tokens, answer.status)


def _number_state(state: str) -> int:
    """A 63-bit number other than 0, the same in every process."""
    return int.from_bytes(blake2b(state.encode(), digest_size=8).digest(), "little") >> 1 or 1
