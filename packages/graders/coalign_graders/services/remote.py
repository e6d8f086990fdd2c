"""The `remote` reward: a service over HTTP in the format of OpenRLHF's `/get_reward` (`coalign serve-reward` is one).

CallBatcher gathers single calls into batched requests; CircuitBreaker pauses calls to a service that does not answer.
"""

from __future__ import annotations

import itertools
import json
import logging
import reprlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from coalign.config.schema.section import OneOrMore
from coalign.rewards.batcher import CallBatcher
from coalign.rewards.calls import GiveUp, quote
from coalign.services import ServiceError
from coalign.types import Sample, Status
from coalign_graders.services.client import JsonClient, ServiceBusy, Url, hide_query
from coalign_graders.services.images import send_images

log = logging.getLogger(__name__)

_MAX_FLOAT = sys.float_info.max


class CircuitBreaker:
    """Stops calls to a failing service, and tries again after a pause.

    Closed, it admits every call. ``failures`` in a row open it: for ``pause`` seconds it admits none, then a single
    trial (half-open), which closes it or opens it again. ``clock`` is in seconds.
    """

    def __init__(self, failures: int, pause: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._pause, self._clock = failures, pause, clock
        self._until: float | None = None  # open until then; None: closed
        self._trying = False
        self.streak = 0
        self.last = ""

    @property
    def left(self) -> float:
        """Seconds until a call is admitted; 0.0 if one is admitted now."""
        return 0.0 if self._until is None else max(0.0, self._until - self._clock())

    def admits(self) -> bool:
        """Whether a call may be made now. Each call that was admitted must end in ``succeeded`` or ``failed``."""
        if self._until is None:
            return True
        if self._trying or self.left:
            return False
        self._trying = True
        return True

    def succeeded(self) -> None:
        self.streak, self._until, self._trying = 0, None, False

    def failed(self, why: str) -> bool:
        """Count a failure; whether the breaker is now open."""
        self.streak, self.last = self.streak + 1, why
        if self._trying or self.streak >= self._limit:
            self._until = self._clock() + self._pause
        self._trying = False
        return self._until is not None


OPTIONAL: dict[str, Callable[[Sample], Any]] = {
    "messages": lambda sample: send_images(sample.messages),
    "responses": lambda sample: sample.response,
    "rows": lambda sample: sample.meta,
    "tokens": lambda sample: int(sample.loss_mask.sum()),
    "tools": lambda sample: sample.meta.get("tools"),
    "truncated": lambda sample: sample.status == Status.TRUNCATED,
}


class Remote:
    """The reward that a service returns for prompt and response.

    POST `{"query": [prompt + response, …], "prompts": […], "labels": […]}` is answered by `{"rewards": [number, …]}`,
    one for each query. Numbers for each query in the answer's `extra_logs` are logged.

    - ``url``: one service or several, called in turn.
    - ``batch_size``: samples in a request (fewer if fewer are waiting); ``concurrency``: requests at the same time.
    - ``label_key``: the row's key for `labels`; rows without it send null.
    - ``send``: further lists to send: `messages` (the conversation, response included, with its images), `responses`,
      `tokens` (the number of trained ones), `tools` (that the policy was shown), `truncated` and `rows` (of the data
      set). `[]` sends only what OpenRLHF does.
    - ``extra``: entries added to the body of every request.
    - ``api_key_env``: the environment variable with a key, which is sent as `Authorization: Bearer …`.
    - ``open_after`` failures in a row, a service gets no call for ``pause`` seconds, then one as a trial.

    **Retries** are the framework's: this object makes none. The samples of a failed request are sent again to the next
    service for the reward's own `patience`, not before `Retry-After`. An answer of several rewards, none of which is a
    number, is a failure too; a single one that is none uses up `retries`. There is no retry for a status of 400 to 499
    other than 408, 425 and 429, nor for samples that got no reward (null). While the breakers of all services are open,
    calls fail at once.

    Raises ValueError if the environment variable is not set, or if ``extra`` overwrites a key of the request.
    """

    is_service = True

    def __init__(
        self,
        *,
        url: Annotated[OneOrMore[Url], Field(min_length=1)],
        batch_size: PositiveInt = 32,
        concurrency: PositiveInt = 8,
        label_key: str = "answer",
        send: Sequence[Literal["messages", "responses", "rows", "tokens", "tools", "truncated"]] = (
            "messages",
            "tokens",
            "tools",
            "truncated",
        ),
        extra: dict[str, Any] | None = None,
        api_key_env: str | None = None,
        open_after: PositiveInt = 5,
        pause: PositiveFloat = 30.0,
    ) -> None:
        self.at_once = batch_size * concurrency
        self._label_key, self._send, self._extra = label_key, tuple(send), dict(extra or {})
        if taken := {"query", "prompts", "labels", *OPTIONAL} & set(self._extra):
            raise ValueError(f"remote: extra has {sorted(taken)}, which are the samples' own; choose other names")
        self._services = {one: CircuitBreaker(open_after, pause) for one in url}
        self._turns = itertools.cycle(self._services.items())
        self._client = JsonClient("remote", api_key_env)
        self._batcher = CallBatcher(self._request_rewards, size=batch_size, at_once=concurrency)

    async def __call__(self, sample: Sample) -> dict[str, float]:
        """Raises GiveUp or ServiceError."""
        return await self._batcher(sample)

    async def _request_rewards(self, samples: Sequence[Sample]) -> list[Any]:
        """Send one request; for each sample its entries, or the exception to raise."""
        body = self._body(samples)
        url, breaker = self._next_service()
        try:
            answer = await self._client.post(url, body)
            results = read_answer(answer, len(samples), hide_query(url))
        except (GiveUp, ServiceBusy):
            breaker.succeeded()  # the service works, and refused this request
            raise
        except BaseException as error:  # a deadline comes as a cancellation
            self._note_failure(url, breaker, str(error) or "no answer in time")
            raise
        breaker.succeeded()
        return results

    def _body(self, samples: Sequence[Sample]) -> bytes:
        lists = {
            "query": [sample.prompt + sample.raw_response for sample in samples],
            "prompts": [sample.prompt for sample in samples],
            "labels": [sample.meta.get(self._label_key) for sample in samples],
        }
        try:
            lists |= {name: [OPTIONAL[name](sample) for sample in samples] for name in self._send}
            return json.dumps(lists | self._extra, allow_nan=False).encode()
        except OSError as error:
            raise GiveUp(f"remote: an image cannot be read: {error}") from error
        except (TypeError, ValueError) as error:
            raise GiveUp(f"remote: these samples cannot be sent as JSON: {error}") from error

    def _next_service(self) -> tuple[str, CircuitBreaker]:
        for url, breaker in itertools.islice(self._turns, len(self._services)):
            if breaker.admits():
                return url, breaker
        resting = "; ".join(
            f"{hide_query(url)} ({breaker.streak} failures in a row, the last: {breaker.last}; "
            f"to be tried again in {breaker.left:.0f} s)"
            for url, breaker in self._services.items()
        )
        raise ServiceError(f"the circuit is open, no request was made: {resting}")

    def _note_failure(self, url: str, breaker: CircuitBreaker, why: str) -> None:
        if breaker.failed(why):
            message = "%s: %d failures in a row, no requests for %.0f s; the last: %s"
            log.warning(message, hide_query(url), breaker.streak, breaker.left, why)


def read_answer(answer: Any, expected: int, service: str) -> list[Any]:
    """The entries of each sample in a service's answer, or a GiveUp where it has no reward.

    Raises ServiceError for anything but a list of ``expected`` rewards, and for several of which none is a number.
    """
    rewards = answer.get("rewards") if isinstance(answer, dict) else None
    if not isinstance(rewards, list):
        raise ServiceError(f'{service}: the answer has no list "rewards": {reprlib.repr(answer)}')
    if len(rewards) != expected:
        raise ServiceError(f"{service}: {len(rewards)} rewards for {expected} samples")
    if expected > 1 and not any(reward is None or _is_number(reward) for reward in rewards):
        raise ServiceError(f"{service}: none of {expected} rewards is a number: {quote(rewards)}")
    errors = answer["errors"] if isinstance(answer.get("errors"), dict) else {}
    logs = _numbers(answer.get("extra_logs"), expected)
    results: list[Any] = []
    for i, reward in enumerate(rewards):
        if reward is None:
            reason = errors.get(str(i), "null")
            text = reason[:500] if isinstance(reason, str) else reprlib.repr(reason)
            results.append(GiveUp(f"{service}: no reward: {text}"))
        else:
            results.append({name: values[i] for name, values in logs.items()} | {"reward": reward})
    return results


def _numbers(logs: Any, expected: int) -> dict[str, list[float]]:
    """The entries of `extra_logs` that are one number for each sample; the format allows anything there."""
    return {
        name: values
        for name, values in (logs.items() if isinstance(logs, dict) else ())
        if isinstance(values, list) and len(values) == expected and all(map(_is_number, values))
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= _MAX_FLOAT  # also false for NaN
