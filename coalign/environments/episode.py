"""One sample of an environment: conversations with the policy, whose turns are kept as a tree of tokens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Protocol, TypeVar

from coalign.data.examples import KEEPS_SPECIAL_TOKENS
from coalign.data.messages import Message, parse_tools
from coalign.data.templates import Tools
from coalign.environments.rendering import Rendering
from coalign.environments.tree import EpisodeRow, Turn, TurnTree
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
        stream: int,
        images: tuple[ImageSpan, ...],
    ) -> Response:
        """Generate the continuation of ``tokens``, of which the first ``prompt_length`` precede the first turn.

        ``stream`` numbers the sample's streams of random numbers. ``images`` stand in the tokens.
        """
        ...

    def forget(self, group: int, index: int) -> None:
        """No more turns of this sample will follow."""
        ...

    def decode(self, tokens: Sequence[int], *, special: bool) -> str: ...


class EpisodeOver(RuntimeError):
    """The environment continued an episode that was ended from outside (a timeout, or enough complete groups)."""


class OutOfTokens(RuntimeError):
    """The environment asked for another turn after an empty one. That ends its episode."""


class Conversation:
    """Messages between an environment and the policy. Each turn goes on behind the one before it.

    ``messages`` is the conversation so far as people read it, ``tools`` the functions that the policy may call.
    """

    def __init__(self, episode: Episode, messages: Sequence[Message], label: str = "") -> None:
        self.episode = episode
        self.label = label
        self.messages: list[Message] = [*messages]
        self.tools: Tools | None = None
        self._last: Turn | None = None
        self._prompt: list[int] | None = None  # tokens of the first prompt; None: rendered from the messages
        self._prompt_images: tuple[ImageSpan, ...] = ()
        self._new_messages: list[Message] = []  # since the last turn, not in its tokens yet
        self._new_tokens: list[int] = []  # since the last turn, not in its tokens yet
        self._anchor: str | None = None  # name of the state before the next turn, if the environment gives one
        self._generating = False

    def begin(self, messages: Sequence[Message] | None = None, *, tools: Tools | None = None) -> None:
        """Replace the messages before the first turn, or show the policy ``tools`` (JSON Schema functions).

        Special tokens that these spell are tokens if the row's source has `keep_special_tokens`, else text.
        Raises RuntimeError after the first turn.
        """
        if self._last is not None:
            raise RuntimeError("Episode.begin comes before the first turn; later, messages are added with `say`")
        self.messages = self.messages if messages is None else self.episode.rendering.read_messages(messages)
        self.tools = self.tools if tools is None else tools
        self._prompt = None

    def say(self, *messages: Message) -> None:
        """Add the environment's messages (tool results, a user's words), which the policy reads before its next turn.

        Contents may hold images, as parts of any of the usual forms, in a run that reads them. Tokens of messages are
        not trained on. Messages after the last turn leave no tokens. RuntimeError together with `write`. Special tokens
        that they spell stay text, and are counted in `episode/markers`.
        """
        self.episode.check_open()
        if self._new_tokens:
            raise RuntimeError(_NOT_BOTH)
        self._count_spelled(messages)
        read = self.episode.rendering.read_messages(messages)
        self.messages += read
        self._new_messages += read

    def write(self, text: str) -> None:
        """Add plain text without a chat template; not trained on. RuntimeError together with `say`.

        Special tokens that it spells stay text, and are counted, as in messages.
        """
        self.episode.check_open()
        if self._new_messages:
            raise RuntimeError(_NOT_BOTH)
        self._count_spelled(text)
        self.messages.append({"role": "user", "content": text})
        self._new_tokens += self.episode.rendering.guard.read(text)

    async def generate(self, *, max_new_tokens: int | None = None, stop: str | Sequence[str] | None = None) -> Turn:
        """The policy's next turn, of at most ``max_new_tokens``.

        ``stop``: strings that end it (None: those of the run).

        Where `data.reasoning` drops the reasoning of earlier turns, the policy reads the conversation as a new prompt.
        The turns before are a row of their own, which is trained on, too; `episode/rows` counts them.

        The run's `max_new_tokens` limits all turns of the episode together, and the capacity (of the context, the KV
        cache, a micro-batch) limits all tokens of a row. Without tokens left, there is one empty turn (TRUNCATED), and
        after it OutOfTokens is raised. Raises RenderingError if the chat template does not define what messages add,
        ValueError if the prompt leaves no tokens for a first turn.
        """
        episode = self.episode
        episode.check_open()
        if self._last is not None and not self._last.tokens:
            raise OutOfTokens(f"group {episode.group}, index {episode.index} has used all its tokens")
        if self._generating:
            raise RuntimeError("a conversation generates one turn at a time")
        anew = self._last is not None and episode.rendering.rewrites(self._new_messages)
        added, images = self._unread(anew)
        said = self._new_messages or self._new_tokens if self._last is not None else None
        state = json.dumps(said or self.messages, sort_keys=True, default=str) if self._anchor is None else self._anchor
        self._generating = True
        try:
            turn = await episode.sample(
                None if anew else self._last,
                added,
                images,
                max_new_tokens=max_new_tokens,
                stop=(stop,) if isinstance(stop, str) else stop,
                state=state,
                label=self.label,
            )
        finally:
            self._generating = False
        if not turn.tokens:
            turn.parent = self._last
        self._last, self._new_messages, self._new_tokens, self._anchor = turn, [], [], None
        self.messages.append({"role": "assistant", "content": turn.text})
        if self is episode:
            self.episode.status = turn.status
        return turn

    def reward(self, value: float) -> None:
        """Add to the reward of the last turn. ValueError for a value that is not finite."""
        if not math.isfinite(value):
            raise ValueError(f"the reward of a turn is {value}; expected a finite number")
        played = self._last.path if self._last else self.episode.tree.turns if self is self.episode else []
        turns = [turn for turn in played if turn.tokens and turn.trained]
        if not turns:
            raise RuntimeError("Episode.reward comes after a turn of the policy")
        turns[-1].reward += float(value)

    def anchor(self, state: str) -> None:
        """Name the state in which the next turn begins, for recipes that compare turns of one state (`gigpo`).

        Without it the state is the text that the policy reads before the turn: the prompt, or the messages since its
        last turn.
        """
        self._anchor = state

    def _unread(self, anew: bool) -> tuple[list[int], Sequence[ImageSpan]]:
        """Return the tokens that the policy has not read (the prompt, or those since its last turn), and their images.

        ``anew``: render the whole conversation as a prompt.
        """
        rendering = self.episode.rendering
        if self._last is not None and not anew:
            tokens, images = [], ()
            if self._new_messages:
                tokens, images = rendering.render_messages(self._last.tokens, self._new_messages, self.tools)
        elif self._prompt is None or anew or self._new_messages:
            tokens, images = rendering.render_prompt(
                self.messages, self.tools, KEEPS_SPECIAL_TOKENS in self.episode.row
            )
        else:
            tokens, images = self._prompt, self._prompt_images
        return tokens + self._new_tokens, images

    def _count_spelled(self, content: Any) -> None:
        if self.episode.rendering.guard.is_spelled(content):
            self.episode.counts["markers"] += 1


class Episode(Conversation):
    """One sample while it is played: its main conversation, and all turns of the policy in it.

    ``row`` is the data set's row; ``group`` and ``index`` say which draw and which of its samples this is. ``random``
    is this episode's own generator, the same in every run of the same seed. ``tree`` has the turns, of which
    ``rows`` are made when the episode ends.
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
        super().__init__(self, row.get("messages") or [])
        self.row = row
        self.group = group
        self.index = index
        self.seed = seed
        self.random = random.Random(f"{seed}/{group}/{index}")
        self.rendering = rendering
        self.tree = TurnTree()
        self.rows: list[EpisodeRow] = []
        self.counts: Counter[str] = Counter()
        self.status = Status.OK
        self.tools = parse_tools(row["tools"], "tools") if row.get("tools") else None
        self._prompt, self._prompt_images = list(prompt), tuple(images)
        self._left = max_new_tokens
        self._policy = policy
        self._empty_turns = 0
        self.is_cut = False  # another limit than that of tokens has ended it
        self._over = False

    # ---- for environments --------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int | None:
        """Tokens of the longest conversation that fits; None: unlimited."""
        return self._policy.capacity

    def conversation(self, messages: Sequence[Message], *, tools: Tools | None = None, label: str = "") -> Conversation:
        """Open another conversation with the policy, such as one with a critic. Its turns are trained on, too.

        It is a row of its own; ``label`` says whose it is. Its tokens count in the limits of the episode.
        """
        other = Conversation(self, (), label)
        other.begin(messages, tools=tools)
        return other

    async def ask(
        self,
        messages: Sequence[Message],
        tools: Tools | None = None,
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] | None = None,
        label: str = "",
        trained: bool = True,
    ) -> Turn:
        """The policy's answer to ``messages`` (of the chat form), whatever was asked before.

        It goes on behind the turn that the messages repeat; where they repeat none, they are rendered anew. Let the
        next request find the turn by `remember`. One that is not ``trained`` is sampled alike. Raises what
        `generate` raises.
        """
        self.check_open()
        if self._empty_turns > (self._left > 0):  # a conversation may be full while others have room
            raise OutOfTokens(f"group {self.group}, index {self.index} has used all its tokens")
        sent = self.rendering.read_messages(messages)
        parent, known = self.tree.find(tools, sent)
        if parent is not None and known < len(sent) and not self.rendering.rewrites(sent[known:]):
            added, images = self.rendering.render_messages(parent.tokens, sent[known:], tools)
        else:
            prompt, images = self.rendering.render_prompt(sent, tools, KEEPS_SPECIAL_TOKENS in self.row)
            parent = self.tree.find_by_tokens(prompt)
            start = parent.start + len(parent.tokens) if parent else 0
            added = prompt[start:]
            images = tuple(replace(span, start=span.start - start) for span in images if span.start >= start)
        state = json.dumps(sent[known:], sort_keys=True, default=str)
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop": stop, "label": label, "trained": trained}
        turn = await self.sample(parent, added, images, state=state, **options)
        turn.messages, turn.tools = sent, tools
        return turn

    def remember(self, turn: Turn, answer: Message) -> None:
        """Let requests find a turn of `ask` by the messages it was asked with, and the ``answer`` that was made of it.

        Raises what `parse_messages` raises.
        """
        self.tree.remember(turn, *self.rendering.read_messages([answer]))

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

    def count(self, name: str, value: float = 1.0) -> None:
        """Add to a count of this episode; the metric `episode/<name>` is its mean over episodes."""
        self.counts[name] += value  # pyright: ignore[reportArgumentType]  (Counter adds floats too; its stubs say int)

    # ---- for conversations -------------------------------------------------------------------------------------------

    async def sample(
        self,
        parent: Turn | None,
        added: list[int],
        images: Sequence[ImageSpan] = (),
        *,
        max_new_tokens: int | None,
        stop: Sequence[str] | None,
        state: str,
        label: str = "",
        trained: bool = True,
    ) -> Turn:
        """Let the policy answer ``added`` tokens behind ``parent``, and add the turn to the tree.

        Without room for a token the turn is empty, and not in the tree. ValueError if there is none for a first turn.
        """
        context = (parent.path_tokens if parent else []) + added
        capacity, budget = self._policy.capacity, self._left
        left = budget if capacity is None else min(budget, capacity - len(context))
        if left <= 0:
            if not self.tree.turns:
                raise ValueError(f"the prompt has {len(added)} tokens, and {capacity} fit")
            self.counts["out_of_room"] += budget > 0
            self._empty_turns += 1
            return Turn("", "", [], Status.TRUNCATED, len(self.tree.turns), parent)
        stream = self._choose_stream(parent, added)
        path = parent.path if parent else []
        spans, start = [], 0
        for turn in path:
            spans += [replace(span, start=span.start + start) for span in turn.images]
            start += len(turn.added) + len(turn.tokens)
        spans += [replace(span, start=span.start + start) for span in images]
        with self.clock.paused():
            answer = await self._policy.respond(
                context,
                group=self.group,
                index=self.index,
                prompt_length=len(path[0].added if path else added),
                limit=left if max_new_tokens is None else min(left, max_new_tokens),
                stop=None if stop is None else tuple(stop),
                stream=stream,
                images=tuple(spans),
            )
        self.check_open()
        tokens, decode = answer.tokens.tolist(), self._policy.decode
        turn = Turn(
            decode(tokens, special=False),
            decode(tokens, special=True),
            tokens,
            answer.status,
            0,
            parent,
            added,
            tuple(images),
            answer.logprobs.tolist(),
            answer.versions.tolist(),
            answer.experts,
            stream,
            _number_state(state),
            label,
            trained,
        )
        self.tree.add(turn)
        self._left -= len(tokens)
        self.counts["turns"] += 1
        self.counts["out_of_room"] += turn.status == Status.TRUNCATED and len(tokens) == left < budget
        return turn

    def check_open(self) -> None:
        """RuntimeError once the episode has ended."""
        if self._over:
            raise EpisodeOver(f"group {self.group}, index {self.index} has ended")

    def _choose_stream(self, parent: Turn | None, added: list[int]) -> int:
        """Choose the stream of random numbers of a turn: its parent's, or another one for what was asked already.

        It follows from the tokens, not from the order in which requests arrive, the first one excepted.
        """
        is_first = not self.tree.asked
        repetition = self.tree.count_asked(parent, added)
        if is_first or (parent is not None and repetition == 0):
            return parent.stream if parent else 0
        return _number_state(json.dumps([parent.stream if parent else None, added, repetition])) >> 32

    # ---- for the runner ----------------------------------------------------------------------------------------------

    def close(self, status: Status | None = None) -> None:
        """End the episode, with ``status`` in place of that of the main conversation's last turn if given.

        An episode without a turn is dropped like a failed one (status ERROR) and counted in `episode/empty`.
        """
        if self._over:
            return
        self._over = True
        self._policy.forget(self.group, self.index)
        self.rows = self.tree.rows()
        if not self.rows:
            prompt = Turn("", "", [], Status.ERROR, added=self._prompt or [], images=self._prompt_images)
            self.rows = [EpisodeRow()]
            self.rows[0].add(prompt, trained=False)
            if status is None:
                self.status = Status.ERROR
                self.counts["empty"] += 1
        elif (leaf := self.rows[0].leaf) is not None and leaf.messages:  # the conversation that a reward reads
            self.messages, self.tools = [*leaf.messages], leaf.tools
            self.status = Status.TRUNCATED if self._empty_turns or self.is_cut else leaf.status
        self.status = self.status if status is None else status
        self.counts["rows"] += len(self.rows)


def _number_state(state: str) -> int:
    """A 63-bit number other than 0, the same in every process."""
    return int.from_bytes(blake2b(state.encode(), digest_size=8).digest(), "little") >> 1 or 1
