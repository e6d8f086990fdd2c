"""HTTP servers for untrusted clients: uvicorn's, with limits on waiting times and memory."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from coalign.http_types import Event, HttpRefusal

try:
    import h11
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware.gzip import GZipMiddleware
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route
    from uvicorn import Config, Server
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ModuleNotFoundError as missing:
    raise ImportError(
        f"an HTTP server needs {missing.name}, which is not installed: pip install 'coalign[serve]'"
    ) from None

MAX_HEAD_BYTES = 16 * 2**10  # request line and headers; more is answered by 400


class _BoundedConnection(H11Protocol):
    """A connection that is cut when the client keeps it waiting for ``timeout`` seconds.

    The clock runs until a request is complete and while its answer is taken, not while the application computes.
    Above ``limit`` open connections, a new one is cut at once.
    """

    def __init__(self, *arguments: Any, timeout: float, limit: int, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._seconds, self._limit = timeout, limit
        self._deadline: asyncio.TimerHandle | None = None
        self._is_full = False  # the client does not read its answer

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        if len(self.connections) > self._limit:
            transport.abort()
        self._watch()

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)
        except h11.LocalProtocolError:  # invalid data after the start of an answer
            self.transport.abort()
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._is_full = True
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._is_full = False
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_waiting()

    def _watch(self) -> None:
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete and not cycle.more_body and not self._is_full:
            self._stop_waiting()
        elif self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(self._seconds, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


@dataclass(frozen=True)
class EventStream:
    """An answer in pieces: server-sent events, as they come. A client that leaves cancels their generator."""

    events: AsyncGenerator[Event, None]
    headers: Mapping[str, str] = field(default_factory=dict)

    async def write(self) -> AsyncIterator[bytes]:
        async with contextlib.aclosing(self.events) as events:
            async for name, data in events:
                yield _write_event(name, data)


def _write_event(name: str | None, data: dict[str, Any] | str | None) -> bytes:
    if data is None:
        return b": waiting\n\n"
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + (data.encode() if isinstance(data, str) else _write_json(data)) + b"\n\n"


Handler = Callable[[Request], Awaitable[dict[str, Any] | EventStream | Response]]


def build_application(
    handlers: Mapping[tuple[str, str], Handler],
    describe_error: Callable[[str, int, str], dict[str, Any]],
    *,
    compress: bool = False,
    **options: Any,
) -> Starlette:
    """Return the application that answers by what the handler for (method, path) returns, or by the JSON of an error.

    ``describe_error(path, status, message)`` is that of an error. A handler's own response is sent as it is.
    ``compress``: to clients that take gzip. ``options``: Starlette's.
    """

    def answer_error(request: Request, error: Exception) -> Response:
        match error:
            case ClientDisconnect():
                return Response()  # to nobody
            case HttpRefusal():
                status, message, headers = error.status, str(error), error.headers
            case HTTPException():
                status, message, headers = error.status_code, error.detail, error.headers
            case _:
                status, message, headers = 500, f"{type(error).__name__}: {error}", None
        return respond(describe_error(request.url.path, status, message), status, headers)

    def make_route(method: str, path: str, handler: Handler) -> Route:
        async def answer(request: Request) -> Response:
            content = await handler(request)
            if isinstance(content, Response):
                return content
            if isinstance(content, EventStream):
                return StreamingResponse(content.write(), 200, content.headers, "text/event-stream")
            return respond(content)

        return Route(path, answer, methods=[method])

    application = Starlette(
        routes=[make_route(method, path, handler) for (method, path), handler in handlers.items()],
        exception_handlers=dict.fromkeys((ClientDisconnect, HttpRefusal, HTTPException, Exception), answer_error),
        **options,
    )
    if compress:
        application.add_middleware(GZipMiddleware, minimum_size=1024, compresslevel=4)
    return application


def respond(content: dict[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response of JSON."""
    return Response(_write_json(content), status, headers, "application/json")


def _write_json(content: dict[str, Any]) -> bytes:
    # In ASCII, unlike starlette's: UTF-8 cannot write half a surrogate pair, which requests may hold.
    return json.dumps(content, allow_nan=False).encode()


async def read_body(request: Request, limit: int) -> bytes:
    """Return the body. Raises HttpRefusal for more than ``limit`` bytes, ClientDisconnect if the client leaves."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit:
            raise HttpRefusal(413, f"the body has more than {limit} bytes; send fewer at a time")
    return bytes(body)


def open_listener(host: str, port: int, refusal: str | None) -> tuple[socket.socket, str]:
    """Return a socket that is bound, and not yet listening, and its address (`http://HOST:PORT`).

    Raises ValueError with ``refusal``, unless that is None, for an address that other machines reach, and OSError if
    the port is taken.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        try:
            listener.bind((host, port))
        except OSError as problem:
            raise OSError(problem.errno, f"port {port} of {host}: {problem.strerror}") from None
        address, bound_port = listener.getsockname()[:2]
        if refusal is not None and not ipaddress.ip_address(address).is_loopback:
            raise ValueError(refusal)
    except BaseException:
        listener.close()
        raise
    return listener, f"http://{f'[{address}]' if ':' in host else address}:{bound_port}"


def build_server(application: Starlette, *, timeout: float, connections: int, grace: float | None = None) -> Server:
    """Return a server that keeps to the limits. ``grace``: seconds that requests get to finish when it stops."""
    config = Config(
        application,
        http=cast(Any, partial(_BoundedConnection, timeout=timeout, limit=connections)),
        ws="none",
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        proxy_headers=False,
        log_level="error",  # uvicorn warns of every invalid request
        access_log=False,
        timeout_graceful_shutdown=cast(Any, grace),  # fractions of a second are allowed, too
    )
    config.load()
    return Server(config)
