"""The `remote_judge` reward: a language model behind an API of OpenAI's form that grades or compares responses."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast

from pydantic import AfterValidator, NonNegativeFloat, PositiveInt

from coalign.config.functions import bind, resolve
from coalign.config.schema import Function
from coalign.data.images.placeholders import show_images
from coalign.data.sources import BadRow
from coalign.rewards.calls import GiveUp, quote
from coalign.services import ServiceError
from coalign.types import Sample
from coalign_graders.services.client import JsonClient, Url, hide_query
from coalign_graders.services.images import list_images, send_images
from coalign_graders.services.questions import JudgeQuestions, Messages, name_images

_QUESTIONS = "coalign.rewards.judge_questions"
_KEPT = 100_000  # answers of calls that have not succeeded yet
_FINAL = ("length", "content_filter")  # ends of an answer after which the same question would get no other one


def _build_questions(named: Function) -> JudgeQuestions:
    cls = resolve(named.fn, _QUESTIONS)
    return cls(**bind(cls, named.arguments, ""))


def _check_questions(named: Function) -> Function:
    _build_questions(named)
    return named


class RemoteJudge:
    """Asks a model about the responses to each prompt, as ``ask`` says: `pointwise`, `pairwise`, `rubric` or a class of
    your own.

    POST `{"model": …, "messages": […], "temperature": …, "max_tokens": …}`, one request a question, to ``url``
    (`https://HOST/v1/chat/completions`).

    - ``judge``: the model's name there.
    - ``show_images``: send the images of the prompt, as parts of the type `image_url` that hold them; false for a judge
      that reads text alone.
    - ``concurrency``: requests at the same time.
    - ``extra``: entries added to the body of every request, or in place of its own (null leaves one out).
    - ``api_key_env``: the environment variable with a key, which is sent as `Authorization: Bearer …`.

    What fails, and what is asked again, is as for `remote`. An answer without text is a failure of the service too,
    unless the judge says that a limit or a filter ended it. Answers that were given are kept while others of their
    group are asked for again. A response whose answers cannot be read has no reward; that is not asked again.
    """

    is_service = True

    def __init__(
        self,
        *,
        url: Url,
        judge: str,
        show_images: bool = True,
        ask: Annotated[Function, AfterValidator(_check_questions)] = Function(fn="pointwise"),
        max_tokens: PositiveInt = 1024,
        temperature: NonNegativeFloat = 0.0,
        concurrency: PositiveInt = 16,
        extra: dict[str, Any] | None = None,
        api_key_env: str | None = None,
    ) -> None:
        self._questions = _build_questions(Function.model_validate(ask))
        body = {"model": judge, "temperature": temperature, "max_tokens": max_tokens, **(extra or {})}
        self._body = {name: value for name, value in body.items() if value is not None}
        self._show_images = show_images
        self._url, self._client = url, JsonClient("remote_judge", api_key_env)
        self.at_once, self._free = concurrency, asyncio.Semaphore(concurrency)
        self._answers: dict[bytes, str | None] = {}  # by question; None: it has none, for good

    @staticmethod
    def check_row(row: Mapping[str, Any], *, ask: Any, **_: Any) -> None:
        """Raise BadRow for a row that does not say what to ask."""
        if check := getattr(_build_questions(Function.model_validate(ask)), "check_row", None):
            check(row)

    async def __call__(self, group: Sequence[Sample]) -> list[Any]:
        """The reward of each response, or a GiveUp. Raises ServiceError or GiveUp."""
        try:
            questions = self._questions.ask(group if self._show_images else name_images(group))
        except BadRow as error:
            raise GiveUp(f"remote_judge: {error}") from error
        bodies = self._write(questions, group[0])
        different = list(dict.fromkeys(bodies))
        replies = await asyncio.gather(*map(self._ask, different), return_exceptions=True)
        failed = [reply for reply in replies if isinstance(reply, BaseException)]
        if failed:  # whatever repeating does not mend is first; then the one that asks for the longest pause
            raise max(failed, key=lambda e: e.seconds if isinstance(e, ServiceError) else math.inf)
        reply_by_body = dict(zip(different, replies, strict=True))
        answers = [cast("str | None", reply_by_body[body]) for body in bodies]
        for body in different:
            self._answers.pop(body, None)
        verdicts = [None if answer is None else self._questions.verdict(answer, group) for answer in answers]
        first = next((a for a, verdict in zip(answers, verdicts, strict=True) if verdict is None), None)
        nothing = GiveUp(f"no verdict in what the judge answers: {quote(first)}")
        return [nothing if reward is None else reward for reward in self._questions.rewards(group, verdicts)]

    def _write(self, questions: Sequence[Messages], about: Sample) -> list[bytes]:
        try:
            if self._show_images and (images := list_images(about.meta.get("messages") or ())):
                questions = [send_images(show_images(messages, images)) for messages in questions]
            return [json.dumps({"messages": chat, **self._body}, allow_nan=False).encode() for chat in questions]
        except OSError as error:
            raise GiveUp(f"remote_judge: an image of the prompt cannot be read: {error}") from error
        except (TypeError, ValueError) as error:
            raise GiveUp(f"remote_judge: this question cannot be sent as JSON: {error}") from error

    async def _ask(self, body: bytes) -> str | None:
        """The answer to a question; asked for, unless an earlier call got it."""
        if body in self._answers:
            return self._answers[body]
        async with self._free:
            answer = read_choice(await self._client.post(self._url, body), hide_query(self._url))
        while len(self._answers) >= _KEPT:
            del self._answers[next(iter(self._answers))]
        self._answers[body] = answer
        return answer


def read_choice(answer: Any, service: str) -> str | None:
    """The text of the first choice, or None if it was cut or withheld. ServiceError for anything else."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    message = first.get("message") if isinstance(first, dict) else None
    if not isinstance(first, dict) or not isinstance(message, dict):
        raise ServiceError(f"{service}: the answer has no choice with a message: {quote(answer)}")
    text = message.get("content")
    if isinstance(text, str) and text.strip():
        return text
    if first.get("finish_reason") in _FINAL or message.get("refusal"):
        return None
    raise ServiceError(f"{service}: the answer's message has no text: {quote(message)}")
