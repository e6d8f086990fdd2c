"""Rewards from a service over HTTP, in the format of OpenRLHF's `/get_reward`; `coalign serve-reward` is one.

A circuit breaker: stops calling what does not answer, and tries again after a pause.

Single calls gathered into batches: what arrives while others are under way goes out together.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from email.utils import parsedate_to_datetime
from typing import Annotated, Any, Generic, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt

from coalign.config.schema.base import OneOrMore
from coalign.rewards.calls import GiveUp, TryLater
from coalign.types import Sample


class Breaker:
    """Closed, it admits every call. ``failures`` in a row open it: it admits none for ``pause`` seconds, then a single
    trial (half-open), whose outcome closes it or opens it again. ``clock`` in seconds."""

    def __init__(self, failures: int, pause: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._pause, self._clock = failures, pause, clock
        self._until: float | None = None  # open until then; None: closed
        self._trying = False
        self.streak = 0
        self.last = ""

    @property
    def left(self) -> float:
        """Seconds until a call is let through; 0.0 if one is now."""
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
        """Count a failure; whether the breaker is open now."""
        self.streak, self.last = self.streak + 1, why
        if self._trying or self.streak >= self._limit:
            self._until = self._clock() + self._pause
        self._trying = False
        return self._until is not None


Item = TypeVar("Item")


class Batches(Generic[Item]):
    """``await batches(item)`` is the item's part of what ``run([items])`` returns, one result for each, in order
    (ValueError for another number).

    Nothing waits for a batch to fill: items that come in the same turn of the event loop, or while ``at_once`` batches
    run, share one of at most ``size``. A result that is an exception is raised to its caller only; what ``run`` raises,
    to all of the batch. A batch is cancelled once nobody waits for any of it. Belongs to one event loop.
    """

    def __init__(self, run: Callable[[list[Item]], Awaitable[Sequence[Any]]], *, size: int, at_once: int) -> None:
        self._run, self._size, self._at_once = run, size, at_once
        self._waiting: deque[tuple[Item, asyncio.Future[Any]]] = deque()
        self._running: set[asyncio.Task[None]] = set()

    @property
    def waiting(self) -> int:
        """Items that are in no batch yet."""
        return len(self._waiting)

    async def __call__(self, item: Item) -> Any:
        loop = asyncio.get_running_loop()
        result = loop.create_future()
        self._waiting.append((item, result))
        loop.call_soon(self._start)  # behind all that comes in this turn of the loop
        return await result

    def _start(self) -> None:
        while len(self._running) < self._at_once and (batch := self._next()):
            task = asyncio.get_running_loop().create_task(self._settle(batch))
            self._running.add(task)
            task.add_done_callback(self._ended)
            _cancel_with_all([result for _, result in batch], task)

    def _next(self) -> list[tuple[Item, asyncio.Future[Any]]]:
        batch = []
        while self._waiting and len(batch) < self._size:
            item, result = self._waiting.popleft()
            if not result.done():  # its caller may have given up meanwhile
                batch.append((item, result))
        return batch

    async def _settle(self, batch: list[tuple[Item, asyncio.Future[Any]]]) -> None:
        try:
            results = await self._run([item for item, _ in batch])
            if len(results) != len(batch):
                raise ValueError(f"{len(results)} results for {len(batch)} items")
        except Exception as error:
            results = [error] * len(batch)
        for (_, waiting), result in zip(batch, results, strict=True):
            if waiting.done():
                continue
            if isinstance(result, Exception):
                waiting.set_exception(result)
            else:
                waiting.set_result(result)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._start()


def _cancel_with_all(results: list[asyncio.Future[Any]], task: asyncio.Task[None]) -> None:
    left = len(results)

    def gone(result: asyncio.Future[Any]) -> None:
        nonlocal left
        left -= result.cancelled()
        if not left:
            task.cancel()

    for result in results:
        result.add_done_callback(gone)


log = logging.getLogger(__name__)

_CONNECT_SECONDS = 5.0  # a machine that is not there is found out sooner than a slow answer
_BUSY = (408, 425, 429)  # the statuses below 500 that say: the same request may succeed later

OPTIONAL: dict[str, Callable[[Sample], Any]] = {
    "messages": lambda sample: sample.messages,
    "responses": lambda sample: sample.response,
    "rows": lambda sample: sample.meta,
    "tokens": lambda sample: int(sample.loss_mask.sum()),
}


class ServiceError(RuntimeError):
    """The service did not answer, or not with rewards. Another attempt may do better."""


def _endpoint(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError(f"is {shown(url)!r}; expected http://HOST:PORT/PATH")
    if parts.password is not None or parts.username is not None:
        raise ValueError(
            "holds a user's name or password, which every copy of the configuration would show; put the "
            "secret into an environment variable and name that in `api_key_env`"
        )
    return url


Url = Annotated[str, AfterValidator(_endpoint)]


class Remote:
    """The reward that a service returns. POST `{"query": [prompt + response, …], "prompts": […], "labels": […]}` is
    answered by `{"rewards": [number, …]}`, one for each query. Numbers for each query in its `extra_logs` are logged.

    - ``url``: of one or several services, taken in turn.
    - ``batch_size`` samples go into a request (fewer, if fewer are waiting), ``concurrency`` requests at once.
    - ``label_key``: the row's key that `labels` are taken from; null for rows that have none.
    - ``send``: further lists, beside the three: `messages` (the conversation, response included), `responses`, `tokens`
      (of the response, as they were trained) and `rows` (the data set's). `[]` sends just what OpenRLHF does.
    - ``extra``: entries of every request's body, as they are.
    - ``api_key_env``: environment variable that holds a key; it is sent as `Authorization: Bearer …`.
    - ``open_after`` failures in a row, a service is not called for ``pause`` seconds, then once, to see.

    **Who retries.** This object never does: a failed request fails its samples, and the framework calls again for
    those, with the reward's own `retries` and `timeout`, at least after what `Retry-After` says, at the next service
    in turn. Not repeated: a status of 400 to 499 other than 408, 425 and 429, and samples that a service answered
    without a reward (null). While all services are resting, calls fail at once; retries go on, so enough of them
    outlast a restart.

    Connections are not kept: between two calls lies a training step, and a service may hang up meanwhile.
    Raises ValueError if the environment variable is not set, or ``extra`` overwrites what is sent.
    """

    def __init__(
        self,
        *,
        url: Annotated[OneOrMore[Url], Field(min_length=1)],
        batch_size: PositiveInt = 32,
        concurrency: PositiveInt = 8,
        label_key: str = "answer",
        send: list[Literal["messages", "responses", "rows", "tokens"]] = ("messages", "tokens"),
        extra: dict[str, Any] | None = None,
        api_key_env: str | None = None,
        open_after: PositiveInt = 5,
        pause: PositiveFloat = 30.0,
    ) -> None:
        import httpx2

        self.at_once = batch_size * concurrency
        self._label_key, self._send, self._extra = label_key, tuple(send), dict(extra or {})
        if taken := {"query", "prompts", "labels", *OPTIONAL} & set(self._extra):
            raise ValueError(f"remote: extra has {sorted(taken)}, which are the samples' own; choose other names")
        self._services = {one: Breaker(open_after, pause) for one in url}
        self._turns = itertools.cycle(self._services.items())
        self._client = httpx2.AsyncClient(
            headers={"Content-Type": "application/json"} | _authorization(api_key_env),
            timeout=httpx2.Timeout(None, connect=_CONNECT_SECONDS),  # the framework's deadline ends a request
            limits=httpx2.Limits(max_keepalive_connections=0),
        )
        self._unanswered = httpx2.HTTPError
        self._batches = Batches(self._scored, size=batch_size, at_once=concurrency)

    async def __call__(self, sample: Sample) -> dict[str, float]:
        """Raises GiveUp, TryLater or ServiceError."""
        return await self._batches(sample)

    async def _scored(self, samples: Sequence[Sample]) -> list[Any]:
        """One request: for each sample its entries, or the exception that stands for them."""
        body = self._body(samples)
        url, breaker = self._next_service()
        try:
            answer = await self._post(url, body)
            results = read_answer(answer, len(samples), shown(url))
        except (GiveUp, TryLater):
            breaker.succeeded()  # it is there, and says what it wants
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
        } | {name: [OPTIONAL[name](sample) for sample in samples] for name in self._send}
        try:
            return json.dumps(lists | self._extra, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise GiveUp(f"remote: these samples cannot be sent as JSON: {error}") from error

    def _next_service(self) -> tuple[str, Breaker]:
        for url, breaker in itertools.islice(self._turns, len(self._services)):
            if breaker.admits():
                return url, breaker
        resting = "; ".join(
            f"{shown(url)} ({breaker.streak} failures in a row, the last: {breaker.last}; "
            f"to be tried again in {breaker.left:.0f} s)"
            for url, breaker in self._services.items()
        )
        raise ServiceError(f"the circuit is open, no request was made: {resting}")

    async def _post(self, url: str, body: bytes) -> Any:
        """The JSON of the answer. ServiceError if there is none; GiveUp, TryLater as the status says."""
        try:
            response = await self._client.post(url, content=body)
        except self._unanswered as error:
            raise ServiceError(f"{shown(url)}: {type(error).__name__}: {error}") from error
        status, said = response.status_code, " ".join(response.text[:200].split())
        message = f"{shown(url)} answered {status}: {said}"
        seconds = _retry_after(response.headers.get("Retry-After"))
        if status in _BUSY or (status >= 500 and seconds is not None):
            raise TryLater(message, seconds or 0.0)
        if status >= 500:
            raise ServiceError(message)
        if status != 200:
            raise GiveUp(message)
        try:
            return json.loads(response.content)
        except ValueError as error:
            raise ServiceError(f"{shown(url)}: the answer is no JSON: {said}") from error

    def _note_failure(self, url: str, breaker: Breaker, why: str) -> None:
        if breaker.failed(why):
            log.warning(
                "%s: %d failures in a row, no requests for %.0f s; the last: %s",
                shown(url),
                breaker.streak,
                breaker.left,
                why,
            )


def read_answer(answer: Any, expected: int, where: str) -> list[Any]:
    """The entries of each sample in a service's answer, or a GiveUp where it has no reward.

    Raises ServiceError for what is no list of ``expected`` rewards.
    """
    rewards = answer.get("rewards") if isinstance(answer, dict) else None
    if not isinstance(rewards, list):
        raise ServiceError(f'{where}: the answer has no list "rewards": {json.dumps(answer)[:200]}')
    if len(rewards) != expected:
        raise ServiceError(f"{where}: {len(rewards)} rewards for {expected} samples")
    errors = answer["errors"] if isinstance(answer.get("errors"), dict) else {}
    logs = _numbers(answer.get("extra_logs"), expected)
    results: list[Any] = []
    for i, reward in enumerate(rewards):
        if reward is None:
            results.append(GiveUp(f"{where}: no reward: {errors.get(str(i), 'null')}"))
        else:
            results.append({name: values[i] for name, values in logs.items()} | {"reward": reward})
    return results


def shown(url: str) -> str:
    """A URL without its query, which may hold a secret."""
    return urlsplit(url)._replace(query="", fragment="").geturl()


def _numbers(logs: Any, expected: int) -> dict[str, list[float]]:
    """What of `extra_logs` is a number for each sample; the format leaves open what else there may be."""
    return {
        name: values
        for name, values in (logs.items() if isinstance(logs, dict) else ())
        if isinstance(values, list) and len(values) == expected and all(map(_is_number, values))
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _authorization(variable: str | None) -> dict[str, str]:
    if variable is None:
        return {}
    if not os.environ.get(variable):
        raise ValueError(
            f"remote: api_key_env is {variable!r}, and the worker has no environment variable of that name"
        )
    return {"Authorization": f"Bearer {os.environ[variable]}"}


def _retry_after(value: str | None) -> float | None:
    """Seconds; the header holds a number of them, or a date."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
