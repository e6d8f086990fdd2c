"""An episode as programs see it: a model that answers questions, of which every turn is recorded."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from coalign.environments.episode import Episode, OutOfTokens
from coalign.environments.tree import Turn
from coalign.http_server import HttpRefusal
from coalign_serve.dialects import Answer, Question
from coalign_serve.dialects.answer import PROMPT_END, read_answer
from coalign_serve.formats import AnswerFormat

_NO_RETRY = {"x-should-retry": "false"}  # read by OpenAI's and Anthropic's clients, which repeat status 409


class EpisodeSession:
    """Answers the questions of one episode's programs, which may overlap.

    A question is refused by HttpRefusal, with a status that makes clients behave: 400 for what will never be answered,
    409 once the episode has ended; they repeat neither.
    """

    def __init__(
        self, episode: Episode, read: AnswerFormat, untrained: Sequence[str] = ("aux",), max_turns: int = 500
    ) -> None:
        """``read``: the format of answers. ``untrained``: names of models under which the policy is asked for turns
        that are not trained on. ``max_turns``: those of the episode."""
        self.episode, self.max_turns = episode, max_turns
        self._read, self._untrained = read, frozenset(untrained)
        self.models = ("policy", *untrained)  # names for clients that ask; any other is the policy's, too
        self.uses: Counter[tuple[str, str]] = Counter()  # what HTTP requests asked for: (what of them, its name)
        self._asked = 0
        self._is_over = False
        self._unread: dict[bytes, asyncio.Task[list[tuple[Turn, Answer]]]] = {}  # whose clients have left, by request

    @property
    def is_cut(self) -> bool:
        """Whether a limit of tokens or turns has ended the episode."""
        return self.episode.is_cut

    @property
    def capacity(self) -> int | None:
        """Tokens of the longest conversation that fits."""
        return self.episode.capacity

    async def answer(self, question: Question, label: str = "", request: bytes = b"") -> tuple[int, list[Answer]]:
        """Return the tokens before the answers, and the answers. ``label`` says whose conversation it is.

        Where the caller is cancelled, since its client has left, the turns are computed all the same: the same
        ``request`` then gets them. Without it a question is computed anew.
        """
        key = blake2b(request).digest()
        if request and (waiting := self._unread.pop(key, None)):
            self.episode.count("retries_joined")
            task = waiting
        else:
            task = asyncio.ensure_future(self._compute(question, label))
        try:
            turns = await asyncio.shield(task)
        except asyncio.CancelledError:
            if request and not task.cancelled():
                self._unread[key] = task
            raise
        first, _ = turns[0]
        return first.start, [answer for _, answer in turns]

    def close(self) -> None:
        """Answer nothing more. What nobody has read did nothing for the reward, and is not trained on."""
        self._is_over = True
        for task in self._unread.values():
            if not task.done():
                task.cancel()
            elif not task.cancelled() and task.exception() is None:
                for turn, _ in task.result():
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

    async def _compute(self, question: Question, label: str) -> list[tuple[Turn, Answer]]:
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
        return [(turn, self._answer(turn, question)) for turn in turns]

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
        except RuntimeError as error:  # it was ended from outside
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
