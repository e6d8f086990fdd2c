"""Requests in JSON to services over HTTP: which answers are failures, and for how long to leave a service alone."""

from __future__ import annotations

import json
import os
import time
from email.utils import parsedate_to_datetime
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator

from coalign.config.secrets import remember_secret
from coalign.rewards.calls import GiveUp
from coalign.services import ServiceError

_CONNECT_SECONDS = 5.0  # an unreachable machine is reported sooner than a slow answer
_MAX_ANSWER = 16 * 2**20  # bytes; the rewards of a request are a few kilobytes
_BUSY = (408, 425, 429)  # statuses below 500 after which the same request may succeed later


class ServiceBusy(ServiceError):
    """The service works, and asks for a later request."""


def _endpoint(url: str) -> str:
    parsed = urlsplit(url)
    if parsed.scheme not in ("http", "https") or not parsed.hostname or parsed.port == 0:
        raise ValueError(f"is {hide_query(url)!r}; expected http://HOST:PORT/PATH")
    if parsed.password is not None or parsed.username is not None:
        raise ValueError(
            "holds a user's name or password, which every copy of the configuration would show; put the "
            "secret into an environment variable and name that in `api_key_env`"
        )
    return url


Url = Annotated[str, AfterValidator(_endpoint)]


class JsonClient:
    """Posts JSON to services, with the key in the environment variable ``api_key_env`` if there is one.

    Connections are not kept alive: a training step lies between two calls, and the service may hang up meanwhile.
    Raises ValueError (``name`` is the reward's) if the environment variable is not set.
    """

    def __init__(self, name: str, api_key_env: str | None) -> None:
        import httpx2

        self._client = httpx2.AsyncClient(
            headers={"Content-Type": "application/json", "Accept-Encoding": "identity"}
            | _authorization(name, api_key_env),
            timeout=httpx2.Timeout(None, connect=_CONNECT_SECONDS),  # the framework's deadline ends a request
            limits=httpx2.Limits(max_keepalive_connections=0),
        )
        self._connection_error = httpx2.HTTPError

    async def post(self, url: str, body: bytes) -> Any:
        """The JSON of the answer. Raises ServiceError if there is none, GiveUp or ServiceBusy as the status says."""
        try:
            async with self._client.stream("POST", url, content=body) as response:
                content = await _read_bounded(response, hide_query(url))
        except self._connection_error as error:
            raise ServiceError(f"{hide_query(url)}: {type(error).__name__}: {error}") from error
        status, excerpt = response.status_code, " ".join(content[:200].decode(errors="replace").split())
        message = f"{hide_query(url)} answered {status}: {excerpt}"
        seconds = _retry_after(response.headers.get("Retry-After"))
        if status in _BUSY or (status >= 500 and seconds is not None):
            raise ServiceBusy(message, seconds or 0.0)
        if status >= 500:
            raise ServiceError(message)
        if status != 200:
            raise GiveUp(message)
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ServiceError(f"{hide_query(url)}: the answer is no JSON: {excerpt}") from error


async def _read_bounded(response: Any, service: str) -> bytes:
    """Read the body as it was sent. Raises ServiceError for a body that is too long, or compressed."""
    if (encoding := response.headers.get("Content-Encoding", "identity")) != "identity":
        raise ServiceError(f"{service}: the answer is compressed ({encoding}), which was not asked for")
    content = bytearray()
    async for piece in response.aiter_raw():
        content += piece
        if len(content) > _MAX_ANSWER:
            raise ServiceError(f"{service}: the answer has more than {_MAX_ANSWER} bytes")
    return bytes(content)


def hide_query(url: str) -> str:
    """The URL without its query, which may hold a secret."""
    return urlsplit(url)._replace(query="", fragment="").geturl()


def _authorization(name: str, variable: str | None) -> dict[str, str]:
    if variable is None:
        return {}
    if not os.environ.get(variable):
        raise ValueError(
            f"{name}: api_key_env is {variable!r}, and the worker has no environment variable of that name"
        )
    remember_secret(variable, os.environ[variable], os.environ[variable])
    return {"Authorization": f"Bearer {os.environ[variable]}"}


def _retry_after(value: str | None) -> float | None:
    """Seconds; the header holds a number of them, or a date."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value.strip())
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError, IndexError, OverflowError):  # as `parsedate_to_datetime` has it
        return None
