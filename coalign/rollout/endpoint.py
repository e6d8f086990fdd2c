"""Chat completions over HTTP on this machine, for one episode: enough of HTTP/1.1 for the usual clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

from coalign.rollout.chat import Completions

_MOST_BYTES = 64 * 2**20  # of a request


@contextlib.asynccontextmanager
async def serve(completions: Completions) -> AsyncIterator[str]:
    """Within this context POST <address>/chat/completions answers; the address ends in /v1. Local connections only."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            status, body = await _respond(completions, reader)
            payload = json.dumps(body).encode()
            head = (
                f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
            )
            writer.write(head.encode() + payload)
            await writer.drain()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/v1"


async def _respond(completions: Completions, reader: asyncio.StreamReader) -> tuple[HTTPStatus, dict[str, Any]]:
    """The answer to one request; what is wrong with it as OpenAI's API reports errors."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    method, path, *_ = head.split(" ", 2)
    fields = dict(line.lower().split(":", 1) for line in head.split("\r\n")[1:] if ":" in line)
    length = int(fields.get("content-length", 0))
    if length > _MOST_BYTES:
        return _error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {_MOST_BYTES} bytes")
    body = await reader.readexactly(length)
    if (method, path) != ("POST", "/v1/chat/completions"):
        return _error(HTTPStatus.NOT_FOUND, f"there is only POST /v1/chat/completions, not {method} {path}")
    try:
        answer = await completions.create(**json.loads(body))
    except Exception as error:
        return _error(HTTPStatus.BAD_REQUEST, f"{type(error).__name__}: {error}")
    return HTTPStatus.OK, answer.model_dump()


def _error(status: HTTPStatus, message: str) -> tuple[HTTPStatus, dict[str, Any]]:
    return status, {"error": {"message": message, "type": "invalid_request_error", "code": status.value}}
