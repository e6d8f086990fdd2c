"""Answers of OpenAI's API: whole, or in pieces as they come."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

from transformers import PreTrainedTokenizerBase

from coalign.environments.episode import Turn
from coalign.types import Status
from coalign_serve.serving.completion_records import ChatMessage, Parser, TokenUsage, find_finish_reason, read_answer
from coalign_serve.serving.engine_loop import ChosenToken
from coalign_serve.text_stream import TextStream, cut_at_stop, decode_answer


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
        self.sent = 0  # tokens whose log-probs were sent
        self.offset = 0  # characters of the tokens that were sent

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

    def _take(self) -> str:
        text = "".join(self._pieces)
        self._pieces.clear()
        return text

    @property
    def turn(self) -> Turn:
        """The whole answer, without the string that has stopped it."""
        raw = self.tokenizer.decode(self.tokens, clean_up_tokenization_spaces=False)
        text = cut_at_stop(decode_answer(self.tokenizer, self.tokens), self.stops)
        assert isinstance(raw, str) and self.status is not None
        return Turn(text, cut_at_stop(raw, self.stops), self.tokens, self.status)

    def spell(self, token: int) -> str:
        text = self.tokenizer.decode([token], clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


class AnswerWriter(ABC):
    """Writes the records of one request's answers. ``prompt_tokens`` are those of all its prompts."""

    object_type: str  # `object` of a complete answer
    piece_type: str  # `object` of a streamed piece
    prefix: str

    def __init__(self, model: str, prompt_tokens: int, has_logprobs: bool) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._head = {"id": self.id, "created": int(time.time()), "model": model}
        self._prompt_tokens, self._has_logprobs = prompt_tokens, has_logprobs

    @abstractmethod
    def write_choice(self, answer: GrowingAnswer) -> dict[str, Any]:
        """Write a whole answer."""

    @abstractmethod
    def write_logprobs(self, answer: GrowingAnswer, first: int) -> dict[str, Any]:
        """Write the log-probs of the tokens from number ``first`` on."""

    @abstractmethod
    def write_text(self, text: str) -> dict[str, Any]:
        """Write a piece of text."""

    def begin(self, index: int) -> list[dict[str, Any]]:
        """Return the pieces before the first text."""
        return []

    def end(self, index: int, answer: GrowingAnswer) -> list[dict[str, Any]]:
        """Return the last piece of an answer, which says why it ended."""
        return [self._piece(index, self.write_text(""), self._finish(answer))]

    def add(self, index: int, answer: GrowingAnswer, text: str) -> list[dict[str, Any]]:
        """Return the piece with a new text, and the log-probs of the tokens since the piece before."""
        if not text and not (self._has_logprobs and answer.status is not None and answer.sent < len(answer.tokens)):
            return []
        content = self.write_text(text)
        if self._has_logprobs:
            content["logprobs"] = self.write_logprobs(answer, answer.sent)
            answer.sent = len(answer.tokens)
        return [self._piece(index, content, None)]

    def write_whole(self, answers: Sequence[GrowingAnswer]) -> dict[str, Any]:
        """Return all answers, complete."""
        choices = []
        for index, answer in enumerate(answers):
            logprobs = self.write_logprobs(answer, 0) if self._has_logprobs else None
            choices.append({"index": index, "logprobs": logprobs, **self.write_choice(answer)})
        return {**self._head, "object": self.object_type, "choices": choices, "usage": self._count(answers)}

    def write_usage(self, answers: Sequence[GrowingAnswer]) -> dict[str, Any]:
        """Return the last piece of all, if the client asked for it: how many tokens there were."""
        return {**self._head, "object": self.piece_type, "choices": [], "usage": self._count(answers)}

    def _piece(self, index: int, content: dict[str, Any], reason: str | None) -> dict[str, Any]:
        choice = {"index": index, "logprobs": None, **content, "finish_reason": reason}
        return {**self._head, "object": self.piece_type, "choices": [choice]}

    def _finish(self, answer: GrowingAnswer) -> str:
        return "stop" if answer.status == Status.OK else "length"

    def _count(self, answers: Sequence[GrowingAnswer]) -> dict[str, Any]:
        chosen = sum(len(answer.tokens) for answer in answers)
        usage = TokenUsage(
            prompt_tokens=self._prompt_tokens, completion_tokens=chosen, total_tokens=self._prompt_tokens + chosen
        )
        return usage.model_dump()


class TextWriter(AnswerWriter):
    """Writes the answers of /v1/completions."""

    object_type = piece_type = "text_completion"
    prefix = "cmpl"

    def write_choice(self, answer: GrowingAnswer) -> dict[str, Any]:
        return {"text": answer.turn.text, "finish_reason": self._finish(answer)}

    def write_text(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def write_logprobs(self, answer: GrowingAnswer, first: int) -> dict[str, Any]:
        texts = [answer.spell(token) for token in answer.tokens[first:]]
        *offsets, answer.offset = accumulate(map(len, texts), initial=answer.offset)
        return {
            "tokens": texts,
            "token_logprobs": answer.logprobs[first:],
            "top_logprobs": None,
            "text_offset": offsets,
        }


class ChatWriter(AnswerWriter):
    """Writes the answers of /v1/chat/completions. ``parser``: reads tool calls; None if none were offered.

    An answer that may hold tool calls is sent in one piece, since only its end tells what it is.
    """

    object_type = "chat.completion"
    piece_type = "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(self, model: str, prompt_tokens: int, has_logprobs: bool, parser: Parser | None) -> None:
        super().__init__(model, prompt_tokens, has_logprobs)
        self._parser = parser

    def write_choice(self, answer: GrowingAnswer) -> dict[str, Any]:
        message = self._read(answer, 0)
        reason = find_finish_reason(answer.turn.status, message)
        return {
            "message": message.model_dump(exclude_none=True) | {"content": message.content},
            "finish_reason": reason,
        }

    def begin(self, index: int) -> list[dict[str, Any]]:
        return [self._piece(index, {"delta": {"role": "assistant", "content": ""}}, None)]

    def add(self, index: int, answer: GrowingAnswer, text: str) -> list[dict[str, Any]]:
        return [] if self._parser is not None else super().add(index, answer, text)

    def end(self, index: int, answer: GrowingAnswer) -> list[dict[str, Any]]:
        if self._parser is None:
            return [self._piece(index, {"delta": {}}, self._finish(answer))]
        message = self._read(answer, index)
        delta: dict[str, Any] = {"content": message.content}
        if message.tool_calls:
            calls = [call.model_dump() for call in message.tool_calls]
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        content: dict[str, Any] = {"delta": delta}
        if self._has_logprobs:
            content["logprobs"] = self.write_logprobs(answer, 0)
        return [
            self._piece(index, content, None),
            self._piece(index, {"delta": {}}, find_finish_reason(answer.turn.status, message)),
        ]

    def write_text(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def write_logprobs(self, answer: GrowingAnswer, first: int) -> dict[str, Any]:
        content = []
        for token, logprob in list(zip(answer.tokens, answer.logprobs, strict=True))[first:]:
            text = answer.spell(token)
            content.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
        return {"content": content, "refusal": None}

    def _read(self, answer: GrowingAnswer, index: int) -> ChatMessage:
        if self._parser is None:
            return ChatMessage(content=answer.turn.text)
        return read_answer(answer.turn, self._parser, f"call_{self.id[-12:]}_{index}")[0]
