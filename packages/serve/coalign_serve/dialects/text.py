"""OpenAI's completions of plain text, which `coalign serve` alone has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate

from coalign.http_types import Event
from coalign_serve.dialects.chat import ChatCompletions
from coalign_serve.dialects.question import Answer, Json, Question


class TextCompletions(ChatCompletions):
    """Writes answers as texts. Requests ask by prompts: completion_request.py reads them."""

    path = "/completions"
    object_type = piece_type = "text_completion"
    prefix = "cmpl"

    def __init__(self, question: Question, identity: str) -> None:
        super().__init__(question, identity)
        self._offsets: Counter[int] = Counter()  # characters of the tokens whose log-probs were written, by answer

    def begin(self) -> Iterator[Event]:
        yield from ()

    def _write_answer(self, answer: Answer) -> Json:
        return {"text": answer.text}

    def _write_delta(self, delta: Json) -> Json:
        return {"text": delta.get("content", "")}

    def _write_logprobs(self, index: int, logprobs: Sequence[tuple[str, float]]) -> Json | None:
        if not self.question.wants_logprobs or not logprobs:
            return None
        texts, values = zip(*logprobs, strict=True)
        *offsets, self._offsets[index] = accumulate(map(len, texts), initial=self._offsets[index])
        return {
            "tokens": [*texts],
            "token_logprobs": [*values],
            "top_logprobs": None,
            "text_offset": offsets,
        }
