"""One HTTP server for all episodes of a process: any dialect's request becomes a turn of its episode.

The episode is chosen by a key: in the path (`/KEY/v1/…`, for clients of which only the address can be set), or as the
API key.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from coalign.http_server import EventStream, Request, Response, build_application, read_body, respond
from coalign.http_types import Event, HttpRefusal
from coalign_agents.session import EpisodeSession, GatewayConfig, PendingAnswer
from coalign_serve.dialects import DIALECTS, Dialect, Messages, describe_error, describe_model
from coalign_serve.serving.listener import serve_within, wait_for_disconnect

_MAX_REQUEST_BYTES = 64 * 2**20
_CLIENT_TIMEOUT, _MAX_CONNECTIONS = 120.0, 8192  # timeout in seconds
# Whose conversation a request belongs to: verifiers and OpenCode, Claude Code's sub-agents, Codex.
_LABELS = ("x-session-id", "x-claude-code-agent-id", "thread-id")


class Gateway:
    """The episodes that can be reached, by their keys."""

    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        self.address, self.port = "", 0  # while it is served
        self._sessions: dict[str, EpisodeSession] = {}
        handlers: dict[tuple[str, str], Any] = {}
        for prefix in ("/v1", "/{key}/v1", "/ng-rollout/{key}/v1"):  # the last one is NeMo Gym's
            handlers |= {("POST", prefix + dialect.path): partial(self._answer, dialect) for dialect in DIALECTS}
            handlers[("POST", f"{prefix}{Messages.path}/count_tokens")] = self._count_tokens
            handlers[("GET", f"{prefix}/models")] = self._list_models
            handlers[("GET", f"{prefix}/models/{{name:path}}")] = self._describe_model
        self.application = build_application(handlers, describe_error)

    @contextmanager
    def admit(self, session: EpisodeSession) -> Iterator[str]:
        """Let requests reach an episode within this context, which yields its key."""
        key = secrets.token_urlsafe(24)
        self._sessions[key] = session
        try:
            yield key
        finally:
            del self._sessions[key]
            session.close()

    def _find(self, request: Request) -> EpisodeSession:
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        for key in (request.path_params.get("key", ""), request.headers.get("x-api-key", ""), bearer):
            if session := self._sessions.get(key):
                return session
        raise HttpRefusal(401, "no episode has this key; it may have ended", {"x-should-retry": "false"})

    async def _answer(self, dialect: type[Dialect], request: Request) -> Response | EventStream:
        session = self._find(request)
        try:
            return await self._ask(session, dialect, request)
        except HttpRefusal as error:
            session.uses["refusal", f"{error.status} {error}"] += 1
            raise

    async def _ask(self, session: EpisodeSession, dialect: type[Dialect], request: Request) -> Response | EventStream:
        body = await read_body(request, _MAX_REQUEST_BYTES)
        question = dialect.read(body)
        session.count_uses(dialect.__name__, question)
        reply = dialect(question, secrets.token_hex(12))
        label = next((request.headers[name] for name in _LABELS if name in request.headers), "")
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"  # OpenAI's and Anthropic's clients
        answer = await session.begin(question, label, body, is_retry)
        if question.stream:
            await asyncio.wait({answer.task}, timeout=self.config.keepalive)
            if answer.task.done() and answer.task.exception() is not None:
                session.done(answer)
                answer.task.result()  # raises: a refusal has a status of its own
            return EventStream(self._stream(reply, answer, session))
        leaving = asyncio.ensure_future(wait_for_disconnect(request))
        await asyncio.wait({answer.task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            session.leave(answer)
            raise HttpRefusal(499, "the client has left")
        leaving.cancel()
        session.done(answer)
        outcome = answer.task.result()
        reply.prompt_tokens = outcome.prompt_tokens
        return respond(reply.write(outcome.answers))

    async def _stream(
        self, reply: Dialect, answer: PendingAnswer, session: EpisodeSession
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of an answer, which is computed whole: a turn counts only when it is complete."""
        is_sent = False
        try:
            while not answer.task.done():
                yield reply.wait()
                await asyncio.wait({answer.task}, timeout=self.config.keepalive)
            try:
                outcome = answer.task.result()
            except HttpRefusal as error:
                yield reply.fail(error.status, str(error))
            else:
                reply.prompt_tokens = outcome.prompt_tokens
                for event in reply.write_events(outcome.answers):
                    yield event
            is_sent = True
        finally:
            session.done(answer) if is_sent else session.leave(answer)

    async def _count_tokens(self, request: Request) -> dict[str, Any]:
        session = self._find(request)
        question = Messages.read(await read_body(request, _MAX_REQUEST_BYTES))
        rendering = session.episode.rendering
        try:
            tokens, _ = rendering.render_prompt(rendering.read_messages(question.messages), question.tools, False)
        except ValueError as error:
            raise HttpRefusal(400, str(error)) from error
        return {"input_tokens": len(tokens)}

    async def _list_models(self, request: Request) -> dict[str, Any]:
        session = self._find(request)
        return {"object": "list", "data": [_describe(session, name) for name in session.models], "has_more": False}

    async def _describe_model(self, request: Request) -> dict[str, Any]:
        return _describe(self._find(request), request.path_params["name"])


def _describe(session: EpisodeSession, name: str) -> dict[str, Any]:
    return describe_model(name, created_at="1970-01-01T00:00:00Z", max_model_len=session.episode.capacity)


@dataclass
class _SharedGateway:
    """The gateway of one event loop, and how many use it."""

    gateway: Gateway
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0
    served: AsyncExitStack = field(default_factory=AsyncExitStack)


_gateways: dict[tuple[asyncio.AbstractEventLoop, str], _SharedGateway] = {}


@asynccontextmanager
async def join_gateway(config: GatewayConfig) -> AsyncIterator[Gateway]:
    """Serve the gateway within this context. All that join on an event loop share it: the first one starts it.

    Raises OSError if the port is taken.
    """
    key = (asyncio.get_running_loop(), config.model_dump_json())
    shared = _gateways.setdefault(key, _SharedGateway(Gateway(config)))
    shared.users += 1
    try:
        async with shared.lock:
            if not shared.gateway.address:
                serving = serve_within(
                    shared.gateway.application,
                    timeout=_CLIENT_TIMEOUT,
                    connections=_MAX_CONNECTIONS,
                    host=config.host,
                    port=config.port,
                )
                gateway = shared.gateway
                gateway.port = await shared.served.enter_async_context(serving)
                host = "127.0.0.1" if config.host == "0.0.0.0" else config.host
                gateway.address = config.url or f"http://{host}:{gateway.port}"
        yield shared.gateway
    finally:
        shared.users -= 1
        if not shared.users:
            _gateways.pop(key, None)
            await shared.served.aclose()
