"""`coalign serve-reward`: a reward model or reward functions over HTTP.

POST `/get_reward` takes RewardRequest and answers what `write_response` returns; GET `/health` counts responses.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Annotated, Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from coalign.config.errors import describe_error, format_key
from coalign.data.messages import Message, parse_messages
from coalign.data.sources import BadRow
from coalign.http_server import Request, Server, read_body
from coalign.http_types import HttpRefusal
from coalign.report.display import Display
from coalign.rewards.batcher import CallBatcher
from coalign.rewards.calls import RewardError
from coalign_serve.config.serving import ServeConfig
from coalign_serve.judges import ResponseJudge, ResponseToScore, Verdict, open_judge
from coalign_serve.serving.listener import ApiKey, build_limited_server, open_guarded_listener, read_key
from coalign_serve.serving.request_images import RequestImages

log = logging.getLogger(__name__)

# Batches that are scored at once. A model computes one after the other; a slow function does not hold up others.
_MODEL_BATCHES, _FUNCTION_BATCHES = 1, 8
# Python reads JSON in one go, and nothing else runs meanwhile: with these a fraction of a second, not the 5 s that
# 64 MiB of brackets take.
_MAX_BRACKETS, _MAX_COMMAS, _READERS = 500_000, 4_000_000, 2
_MAX_RESPONSE_TOKENS = 2**24

T = TypeVar("T")
ShortList = Annotated[list[T], Field(fail_fast=True)]  # a problem for each of a million entries would fill the memory


class RewardRequest(BaseModel):
    """The body of a request: lists with one entry for each response. Other keys are ignored.

    ``query``, ``prompts`` and ``labels`` are OpenRLHF's; coalign.rewards.Remote sends the others, too.
    """

    model_config = ConfigDict(strict=True)

    query: ShortList[str]
    prompts: ShortList[str] | None = None
    labels: ShortList[Any] | None = None
    responses: ShortList[str] | None = None
    messages: ShortList[ShortList[dict[str, Any]]] | None = None
    rows: ShortList[dict[str, Any]] | None = None
    tokens: ShortList[Annotated[int, Field(ge=0, le=_MAX_RESPONSE_TOKENS)]] | None = None
    tools: ShortList[list[dict[str, Any]] | None] | None = None
    truncated: ShortList[bool] | None = None

    @model_validator(mode="after")
    def _lengths_agree(self) -> RewardRequest:
        for name in type(self).model_fields:
            given = getattr(self, name)
            if given is not None and len(given) != len(self.query):
                raise ValueError(f"{name} has {len(given)} entries, and query {len(self.query)}")
        return self


def read_request(
    body: bytes, label_key: str, strip: Sequence[str] = (), images: RequestImages | None = None
) -> list[ResponseToScore]:
    """Return the responses to score. Raises HttpRefusal naming the wrong key. ``images`` reads those in messages.

    A response is the last of its ``messages``; without them that of ``responses``, else what follows the prompt in the
    query, without the texts of ``strip`` at its end. The row is that of ``rows``, with the label under ``label_key``.
    """
    if sum(map(body.count, (b"[", b"{"))) > _MAX_BRACKETS or body.count(b",") > _MAX_COMMAS:
        raise HttpRefusal(413, f"the body has over {_MAX_BRACKETS} brackets or {_MAX_COMMAS} commas; send fewer")
    try:
        request = RewardRequest.model_validate_json(body)
        return [_read_response(request, i, label_key, strip, images) for i in range(len(request.query))]
    except ValidationError as error:
        problems = error.errors(include_url=False)
        raise HttpRefusal(
            400,
            "; ".join(": ".join(filter(None, (format_key(e["loc"]), describe_error(e)))) for e in problems),
        ) from None
    except BadRow as error:
        raise HttpRefusal(400, str(error)) from None


def write_response(verdicts: Sequence[Verdict | Exception]) -> dict[str, Any]:
    """Return the body of an answer: `rewards`, `scores` (the same, for OpenRLHF), `extra_logs` and maybe `errors`.

    A reward is null where there is none; `errors` holds the reason under the response's number. `extra_logs` holds the
    values of each of several functions.
    """
    rewards: list[float | None] = []
    terms: list[dict[str, float]] = []
    errors: dict[int, str] = {}
    for i, verdict in enumerate(verdicts):
        if isinstance(verdict, Exception):
            errors[i] = f"{type(verdict).__name__}: {verdict}"
        elif verdict.score is None:
            errors[i] = verdict.why
        elif not math.isfinite(verdict.score):
            errors[i] = f"the score is {verdict.score}"
        else:
            rewards.append(verdict.score)
            terms.append(verdict.terms)
            continue
        rewards.append(None)
        terms.append({})
    names = terms[0] if terms else {}
    logs = {name: [values.get(name, math.nan) for values in terms] for name in names}
    logs = {name: values for name, values in logs.items() if all(map(math.isfinite, values))}
    return {"rewards": rewards, "scores": rewards, "extra_logs": logs} | ({"errors": errors} if errors else {})


def _read_response(
    request: RewardRequest, i: int, label_key: str, strip: Sequence[str], images: RequestImages | None
) -> ResponseToScore:
    prompt, response = _read_conversation(request, i, strip, images)
    row = dict(request.rows[i]) if request.rows else {}
    if request.labels and request.labels[i] is not None:
        row[label_key] = request.labels[i]
    tokens = request.tokens[i] if request.tokens else 0
    text = None if request.messages else request.query[i]
    tools = request.tools[i] if request.tools else None
    cut = bool(request.truncated and request.truncated[i])
    return ResponseToScore(prompt, [response], row, i, tokens=tokens, tools=tools, text=text, truncated=cut)


def _read_conversation(
    request: RewardRequest, i: int, strip: Sequence[str], images: RequestImages | None
) -> tuple[list[Message], Message]:
    if request.messages:
        messages: Any = request.messages[i]
        if images is not None:
            messages = images.reader.read_messages(messages)
        *prompt, response = parse_messages(messages, f"messages[{i}]", images=images is not None) or [{}]
        if response.get("role") != "assistant":
            raise BadRow(f"messages[{i}] must end with what the assistant said")
        return prompt, response
    question = request.prompts[i] if request.prompts else ""
    answer = request.responses[i] if request.responses else _strip(request.query[i].removeprefix(question), strip)
    return [{"role": "user", "content": question}], {"role": "assistant", "content": answer}


def _strip(text: str, ends: Sequence[str]) -> str:
    while end := next((end for end in ends if end and text.rstrip().endswith(end)), ""):
        text = text.rstrip().removesuffix(end)
    return text


def serve(config: ServeConfig, display: Display) -> None:
    """Serve until SIGINT or SIGTERM; requests under way then get ``config.grace`` seconds to finish.

    Raises ValueError for a judge that cannot be opened or cannot score single responses, or for an address that other
    machines reach without a key; OSError if the port is taken.
    """
    key = read_key(config)
    listener, address = open_guarded_listener(config, config.port, key)  # before a model loads: the port may be taken
    judge = open_judge(config, config.images)
    if judge.compares:
        raise ValueError(f"reward '{judge.compares[0]}' compares the responses to a prompt; a server sees single ones")
    listener.listen()
    what = config.reward_model or ", ".join(reward.called for reward in config.reward)
    display.note(f"serving {what} at {address}/get_reward{f' ({judge.dtype})' if judge.dtype else ''}")
    build_reward_server(judge, config, key).run(sockets=[listener])


def build_reward_server(judge: ResponseJudge, config: ServeConfig, key: str | None = None) -> Server:
    """Return the server of POST /get_reward and GET /health. It closes the judge at shutdown."""
    endpoint = RewardEndpoint(judge, config, key)
    handlers = {("POST", "/get_reward"): endpoint.get_reward, ("GET", "/health"): endpoint.health}
    return build_limited_server(handlers, lambda _path, _status, message: {"error": message}, config, judge.close)


class RewardEndpoint:
    """Scores requests. Responses that arrive together, or while the judge is busy, are scored as one batch."""

    def __init__(self, judge: ResponseJudge, config: ServeConfig, key: str | None = None) -> None:
        self._judge, self._config = judge, config
        self._key = ApiKey(key)
        at_once = _MODEL_BATCHES if config.reward_model else _FUNCTION_BATCHES
        self._batches = CallBatcher(self._score_batch, size=config.batch_size, at_once=at_once)
        self._counts = {"scored": 0, "failed": 0}
        self._readers = asyncio.Semaphore(_READERS)

    async def get_reward(self, request: Request) -> dict[str, Any]:
        """Answer a RewardRequest."""
        self._key.check(request)
        config, body = self._config, await read_body(request, self._config.max_bytes)
        with ExitStack() as stack:
            images = None
            if config.images is not None:
                images = RequestImages(config.images)
                stack.callback(images.close)
            async with self._readers:  # threads, so that other requests go on meanwhile
                answers = await asyncio.to_thread(read_request, body, config.label_key, config.strip, images)
            self._admit(len(answers))
            verdicts = await asyncio.gather(*map(self._batches, answers), return_exceptions=True)
        response = write_response(cast(list[Verdict | Exception], verdicts))
        failed = response["rewards"].count(None)
        if failed:
            first = next(iter(response["errors"].values()))
            log.warning("%d of %d responses have no reward; the first: %s", failed, len(answers), first)
        self._counts["failed"] += failed
        self._counts["scored"] += len(answers) - failed
        return response

    async def health(self, _: Request) -> dict[str, Any]:
        """Answer {status, waiting, scored, failed}, counted in responses."""
        return {"status": "ok", "waiting": self._batches.waiting, **self._counts}

    def _admit(self, count: int) -> None:
        if count > self._config.queue:
            raise HttpRefusal(413, f"{count} responses in a request, and queue={self._config.queue}; send fewer")
        if self._batches.waiting + count > self._config.queue:
            raise HttpRefusal(429, f"{self._batches.waiting} responses are waiting already", {"Retry-After": "1"})

    async def _score_batch(self, answers: list[ResponseToScore]) -> Sequence[Verdict | Exception]:
        # Responses of several requests: each gets a group of its own, so that none is compared with another.
        return await asyncio.to_thread(self._score, [replace(a, group=i) for i, a in enumerate(answers)])

    def _score(self, answers: list[ResponseToScore]) -> Sequence[Verdict | Exception]:
        try:
            return self._judge(answers)
        except RewardError as error:
            return [error] * len(answers)
        except Exception as error:
            # One that cannot be judged (messages that a template refuses, say) does not spoil the others.
            return [error] if len(answers) == 1 else [one for answer in answers for one in self._score([answer])]
