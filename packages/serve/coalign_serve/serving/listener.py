"""What servers are built of: the address, the key that requests must bring, and the limits."""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

from coalign.http_server import (
    Handler,
    Request,
    Server,
    Starlette,
    build_application,
    build_server,
    open_listener,
)
from coalign.http_types import HttpRefusal
from coalign_serve.config.serving import ServerConfig


def read_key(config: ServerConfig) -> str | None:
    """Return the key in the environment variable ``api_key_env``. ValueError if that is named and not set."""
    key = os.environ.get(config.api_key_env) if config.api_key_env is not None else None
    if config.api_key_env is not None and not key:
        raise ValueError(f"api_key_env: there is no environment variable {config.api_key_env!r}")
    return key


def open_guarded_listener(config: ServerConfig, port: int, key: str | None) -> tuple[socket.socket, str]:
    """Return a bound socket and its address, as `open_listener` does.

    Raises ValueError for an address that other machines reach without a key, and OSError if the port is taken.
    """
    refusal = (
        f"host: other machines reach {config.host}, and whoever does could use the server; name the environment "
        "variable with a key: `api_key_env`"
    )
    return open_listener(config.host, port, refusal if key is None else None)


def build_limited_server(
    handlers: Mapping[tuple[str, str], Handler],
    describe_error: Callable[[str, int, str], dict[str, Any]],
    config: ServerConfig,
    close: Callable[[], object],
) -> Server:
    """Return the server of `build_application` with the limits of ``config``. It calls ``close`` at its end."""

    @asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(close)

    application = build_application(handlers, describe_error, lifespan=lifespan)
    return build_server(application, timeout=config.timeout, connections=config.connections, grace=config.grace)


class ApiKey:
    """The key that requests must bring, if there is one."""

    def __init__(self, key: str | None) -> None:
        self._expected = None if key is None else key.encode()

    def check(self, request: Request) -> None:
        """Raise HttpRefusal (401) for a request without the key."""
        if self._expected is None:
            return
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        sent = (
            bearer if scheme == "Bearer" else "",
            request.headers.get("x-api-key", ""),
        )  # Anthropic's clients send the second
        if not any(hmac.compare_digest(key.encode(), self._expected) for key in sent):
            raise HttpRefusal(401, "a key is needed: Authorization: Bearer …", {"WWW-Authenticate": "Bearer"})


async def wait_for_disconnect(request: Request) -> None:
    """Wait until the client, whose body has been read, has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def serve_within(
    application: Starlette, *, timeout: float, connections: int, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[int]:
    """Serve within this context, which yields the port and ends all connections. Port 0: a free one."""
    server = build_server(application, timeout=timeout, connections=connections)
    config, state, loop = server.config, server.server_state, asyncio.get_running_loop()
    connection = cast(Any, config.http_protocol_class)
    listener = await loop.create_server(lambda: connection(config, state, {}), host, port)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.close()
        for client in list(state.connections):
            client.transport.abort()
        for task in (tasks := list(state.tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
