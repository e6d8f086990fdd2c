"""Answers of an engine as they grow, and as events of a dialect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from transformers import PreTrainedTokenizerBase

from coalign.environments.tree import Turn
from coalign.types import Status
from coalign_serve.dialects.answer import read_answer
from coalign_serve.dialects.question import Answer, Question
from coalign_serve.formats import AnswerFormat
from coalign_serve.serving.engine_loop import ChosenToken
from coalign_serve.serving.text_stream import TextStream, decode_answer


@dataclass
class GrowingAnswer:
    """One answer as its tokens come. ``status`` is None until it has ended."""

    tokenizer: PreTrainedTokenizerBase
    stops: Sequence[str]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    status: Status | None = None

    def __post_init__(self) -> None:
        self._pieces: list[str] = []
        self._stream = TextStream(partial(decode_answer, self.tokenizer), self._pieces.append, self.stops)
        self._sent = 0  # tokens whose log-probs were taken

    def add(self, chosen: ChosenToken) -> str:
        """Add a token; return the text that can be sent now."""
        self.tokens.append(chosen.token)
        self.logprobs.append(chosen.logprob)
        self._stream.push(chosen.token)
        return self._take()

    def end(self, status: Status) -> str:
        """End the answer; return the rest of its text."""
        self.status = status
        self._stream.end()
        return self._take()

    def take_logprobs(self) -> list[tuple[str, float]]:
        """Return the texts and log-probs of the tokens since the last call."""
        start, self._sent = self._sent, len(self.tokens)
        return self._spell(start)

    def read(self, question: Question, format: AnswerFormat | None, prompt_end: str, seed: str) -> Answer:
        """Return the whole answer. ``prompt_end``: the text that it goes on from; ``seed`` determines ids of calls."""
        assert self.status is not None
        raw = self.tokenizer.decode(self.tokens, clean_up_tokenization_spaces=False)
        assert isinstance(raw, str)
        turn = Turn(decode_answer(self.tokenizer, self.tokens), raw, self.tokens, self.status)
        answer, _ = read_answer(turn, question, format, prompt_end, seed)
        return replace(answer, logprobs=self._spell(0)) if question.wants_logprobs else answer

    def _take(self) -> str:
        text = "".join(self._pieces)
        self._pieces.clear()
        return text

    def _spell(self, start: int) -> list[tuple[str, float]]:
        texts = [self.tokenizer.decode([token], clean_up_tokenization_spaces=False) for token in self.tokens[start:]]
        return list(zip(map(str, texts), self.logprobs[start:], strict=True))
