"""An episode as programs see it: a model that answers questions, of which every turn is recorded."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Annotated, NamedTuple

from pydantic import Field, PositiveFloat

from coalign.config.schema.section import Section
from coalign.environments.episode import Episode, EpisodeOver, OutOfTokens
from coalign.environments.tree import Turn
from coalign.http_types import HttpRefusal
from coalign_serve.dialects import Answer, Question
from coalign_serve.dialects.answer import PROMPT_END, read_answer
from coalign_serve.formats import find_format

_GRACE = 0.02  # seconds in which the news arrive that a client has left which asks again
_NO_RETRY = {"x-should-retry": "false"}  # read by OpenAI's and Anthropic's clients, which repeat status 409


class GatewayConfig(Section):
    """Where programs reach the policy."""

    host: str = "127.0.0.1"
    """`0.0.0.0` admits other machines; they need an episode's key all the same."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0: any free port."""
    url: str | None = None
    """The address under which other machines reach host and port, such as `http://10.0.0.5:8123`."""
    keepalive: PositiveFloat = 5.0
    """Seconds after which a streamed request is told that its answer is being computed, and again and again."""


LOOPBACK = GatewayConfig()


class AnsweredTurns(NamedTuple):
    """The turns that a question gave, and what they answer."""

    turns: list[Turn]
    answers: list[Answer]

    @property
    def prompt_tokens(self) -> int:
        return self.turns[0].start


@dataclass(eq=False)
class PendingAnswer:
    """The answers to a ``request`` (its digest), which may be computed still.

    ``is_read``: they were sent to a client that waited.
    """

    request: bytes
    task: asyncio.Task[AnsweredTurns]
    is_read: bool = False


class EpisodeSession:
    """Answers the questions of one episode's programs, which may overlap.

    A question is refused by HttpRefusal, with a status that makes clients behave: 400 for what will never be answered,
    409 once the episode has ended; they repeat neither.
    """

    def __init__(
        self, episode: Episode, parser: str, untrained: Sequence[str] = ("aux",), max_turns: int = 500
    ) -> None:
        """``parser`` names the format of answers. ``untrained``: names of models under which the policy is asked for
        turns that are not trained on. ``max_turns``: those of the episode."""
        self.episode, self.max_turns = episode, max_turns
        self._read, self._untrained = find_format(parser, episode.rendering.tokenizer), frozenset(untrained)
        self.models = ("policy", *untrained)  # names for clients that ask; any other is the policy's, too
        self.uses: Counter[tuple[str, str]] = Counter()  # what HTTP requests asked for: (what of them, its name)
        self._asked = 0
        self._is_over = False
        self._latest: PendingAnswer | None = None  # the last one that was begun
        self._waiting: Counter[bytes] = Counter()  # requests whose clients wait
        self._unread: list[PendingAnswer] = []  # those whose clients have left

    async def answer(self, question: Question) -> AnsweredTurns:
        """Answer a question of this process."""
        return await self._compute(question, "")

    async def begin(self, question: Question, label: str, request: bytes, is_retry: bool = False) -> PendingAnswer:
        """Begin to answer a question that came as ``request``. ``label`` says whose conversation it is.

        If a client has left that had asked the same (`leave`), its answer is taken. A client that says that it asks
        again (``is_retry``) gets the one that is being computed, or the last one, too: it may have missed that. Equal
        requests alone prove nothing, since an agent may ask twice. Call `leave` or `done` at the end.
        """
        key = blake2b(request).digest()
        if self._waiting[key] and not is_retry:
            await asyncio.sleep(_GRACE)
        answer = next((unread for unread in self._unread if unread.request == key), None)
        if answer is not None:
            self._unread.remove(answer)
        elif is_retry and self._latest is not None and self._latest.request == key:
            answer = self._latest
        if answer is None:
            answer = self._latest = PendingAnswer(key, asyncio.ensure_future(self._compute(question, label)))
            answer.task.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may wait
        else:
            self.episode.count("retries_joined")
        self._waiting[key] += 1
        return answer

    def done(self, answer: PendingAnswer) -> None:
        """The answer was sent, or a refusal."""
        self._waiting[answer.request] -= 1
        answer.is_read = True
        self._unread = [other for other in self._unread if other is not answer]

    def leave(self, answer: PendingAnswer) -> None:
        """The client has left before it had its answer, which is computed all the same: it may ask again."""
        self._waiting[answer.request] -= 1
        if not answer.is_read:
            self._unread.append(answer)

    def close(self) -> None:
        """Answer nothing more. What nobody has read did nothing for the reward, and is not trained on."""
        self._is_over = True
        for task in (answer.task for answer in self._unread):
            if not task.done():
                task.cancel()
            elif not task.cancelled() and task.exception() is None:
                for turn in task.result().turns:
                    turn.trained = False
                    self.episode.count("unread")

    def count_uses(self, dialect: str, question: Question) -> None:
        """Count what a request uses of its dialect."""
        uses = {
            "streams": question.stream,
            "tools": question.tools is not None,
            "several answers": question.answers > 1,
            "stop strings": bool(question.stop),
            "log-probs": question.wants_logprobs,
        }
        named = [("dialect", dialect), ("model", question.model or "(none)")]
        self.uses.update([*named, *(("feature", name) for name, is_used in uses.items() if is_used)])

    async def _compute(self, question: Question, label: str) -> AnsweredTurns:
        episode = self.episode
        if self._is_over:
            raise HttpRefusal(409, "the episode has ended", _NO_RETRY)
        if self._asked + question.answers > self.max_turns:
            episode.is_cut = True
            raise HttpRefusal(400, f"the episode has had its {self.max_turns} turns")
        self._asked += question.answers
        for name in [f"tools.{tool}" for tool in question.dropped_tools] + [*question.settings]:
            episode.count(f"ignored/{name}")
        turns = await asyncio.gather(*(self._ask(question, label) for _ in range(question.answers)))
        return AnsweredTurns(turns, [self._answer(turn, question) for turn in turns])

    async def _ask(self, question: Question, label: str) -> Turn:
        try:
            turn = await self.episode.ask(
                question.messages,
                question.tools,
                max_new_tokens=question.limit,
                stop=question.stop or None,
                label=label,
                trained=question.model not in self._untrained,
            )
        except ValueError as error:
            raise HttpRefusal(400, str(error)) from error
        except OutOfTokens:
            turn = None
        except EpisodeOver as error:  # it was ended from outside
            raise HttpRefusal(409, str(error), _NO_RETRY) from error
        if turn is None or not turn.tokens:
            self.episode.is_cut = True
            raise HttpRefusal(400, "context_length_exceeded: the episode has no room for another token")
        return turn

    def _answer(self, turn: Turn, question: Question) -> Answer:
        episode = self.episode
        decode = episode.rendering.tokenizer.decode
        prompt_end = str(decode((turn.added or turn.path_tokens)[-PROMPT_END:]))
        seed = f"{turn.stream}/{turn.digest.hex()}"
        answer, unreadable = read_answer(turn, question, self._read, prompt_end, seed)
        if unreadable:
            episode.count("tool_failed/bad_json", unreadable)
        episode.remember(turn, answer.message)
        if question.wants_logprobs:
            texts = [str(decode([token])) for token in turn.tokens]
            answer = replace(answer, logprobs=list(zip(texts, turn.logprobs, strict=True)))
        return answer
