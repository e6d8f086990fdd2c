"""The format of `/get_reward`: a request's body as answers to score, verdicts as the body of the response."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError, model_validator

from coalign.config.errors import dotted, readable
from coalign.data.messages import Message, as_messages
from coalign.data.sources import BadRow
from coalign.runtime.judges import JudgedResponse, Verdict


class BadRequest(ValueError):
    """A body that is not what it should be."""


class RewardRequest(BaseModel):
    """Lists of one entry for each response. ``query``, ``prompts`` and ``labels`` are OpenRLHF's; the others are what
    coalign.rewards.Remote sends as well. Other keys are ignored."""

    model_config = ConfigDict(strict=True)

    query: list[str]
    prompts: list[str] | None = None
    labels: list[Any] | None = None
    responses: list[str] | None = None
    messages: list[list[dict[str, Any]]] | None = None
    rows: list[dict[str, Any]] | None = None
    tokens: list[NonNegativeInt] | None = None

    @model_validator(mode="after")
    def _lengths_agree(self) -> RewardRequest:
        for name in type(self).model_fields:
            given = getattr(self, name)
            if given is not None and len(given) != len(self.query):
                raise ValueError(f"{name} has {len(given)} entries, and query {len(self.query)}")
        return self


def read_request(body: bytes, label_key: str, strip: Sequence[str] = ()) -> list[JudgedResponse]:
    """What there is to score. Raises BadRequest, naming the key.

    The response is the last of the ``messages``; without them that of ``responses``, else what follows the prompt in
    the query, without the texts of ``strip`` at its end. The row is that of ``rows``, with the label under
    ``label_key``.
    """
    try:
        request = RewardRequest.model_validate_json(body)
        return [_answer(request, i, label_key, strip) for i in range(len(request.query))]
    except ValidationError as error:
        problems = error.errors(include_url=False)
        raise BadRequest(
            "; ".join(": ".join(filter(None, (dotted(e["loc"]), readable(e)))) for e in problems)
        ) from None
    except BadRow as error:
        raise BadRequest(str(error)) from None


def write_response(verdicts: Sequence[Verdict | Exception]) -> dict[str, Any]:
    """`rewards` (null where there is none, with the reason in `errors` by number), `scores` (the same, for OpenRLHF)
    and in `extra_logs` the values of several functions."""
    errors = {i: why for i, verdict in enumerate(verdicts) if (why := _why_none(verdict))}
    rewards = [None if i in errors else verdict.score for i, verdict in enumerate(verdicts)]
    parts = [{} if i in errors else verdict.parts for i, verdict in enumerate(verdicts)]
    names = parts[0] if parts else {}
    logs = {name: [part[name] for part in parts] for name in names if all(name in part for part in parts)}
    return {"rewards": rewards, "scores": rewards, "extra_logs": logs} | ({"errors": errors} if errors else {})


def _why_none(verdict: Verdict | Exception) -> str:
    """Why there is no reward; empty if there is one."""
    if isinstance(verdict, Exception):
        return f"{type(verdict).__name__}: {verdict}"
    if verdict.score is None:
        return verdict.why
    return "" if math.isfinite(verdict.score) else f"the score is {verdict.score}"


def _answer(request: RewardRequest, i: int, label_key: str, strip: Sequence[str]) -> JudgedResponse:
    prompt, response = _conversation(request, i, strip)
    row = dict(request.rows[i]) if request.rows else {}
    if request.labels and request.labels[i] is not None:
        row[label_key] = request.labels[i]
    tokens = request.tokens[i] if request.tokens else 0
    text = None if request.messages else request.query[i]
    return JudgedResponse(prompt, [response], row, group=i, tokens=tokens, text=text)


def _conversation(request: RewardRequest, i: int, strip: Sequence[str]) -> tuple[list[Message], Message]:
    if request.messages:
        *prompt, response = as_messages(request.messages[i], f"messages[{i}]") or [{}]
        if response.get("role") != "assistant":
            raise BadRow(f"messages[{i}] must end with what the assistant said")
        return prompt, response
    asked = request.prompts[i] if request.prompts else ""
    said = request.responses[i] if request.responses else _without_ends(request.query[i].removeprefix(asked), strip)
    return [{"role": "user", "content": asked}], {"role": "assistant", "content": said}


def _without_ends(text: str, ends: Sequence[str]) -> str:
    while end := next((end for end in ends if end and text.rstrip().endswith(end)), ""):
        text = text.rstrip().removesuffix(end)
    return text
