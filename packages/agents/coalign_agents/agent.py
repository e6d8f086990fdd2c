"""The environment for agents: a function of a person that asks the policy as it would ask a model's API."""

from __future__ import annotations

import asyncio
import inspect
import json
import secrets
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from pydantic import PositiveInt

from coalign.config.functions import bind, resolve
from coalign.environments.episode import Episode
from coalign_agents.calls import call_function
from coalign_agents.session import LOOPBACK, EpisodeSession, GatewayConfig
from coalign_serve.dialects import ChatCompletions, Dialect, Messages, Responses
from coalign_serve.formats import check_format

_HOME = "coalign_agents.agent"


class Record(dict[str, Any]):
    """An answer of the API: its keys are attributes, too, as in the clients' own objects."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if name in ("tool_calls", "reasoning_content"):  # which answers without them leave out
            return None
        raise AttributeError(f"the record has no '{name}'; it has {', '.join(self)}")

    def model_dump(self, *, exclude_none: bool = False) -> dict[str, Any]:
        return {key: value for key, value in self.items() if not exclude_none or value is not None}


class AgentClient:
    """The policy as OpenAI's and Anthropic's asynchronous clients show a model, without HTTP.

    ``client.chat.completions.create``, ``client.responses.create`` and ``client.messages.create`` take what the API
    takes. Messages that repeat an earlier answer go on behind its tokens. Others begin another row of the episode: a
    summary of the history, a sub-agent, other tools. The run decides how tokens are sampled: ``temperature``,
    ``top_p``, ``seed`` and the like have no effect. They raise HttpRefusal for what the API would refuse, and
    ValueError for streams.
    """

    def __init__(self, session: EpisodeSession, events: asyncio.AbstractEventLoop | None = None) -> None:
        """``events``: where a plain function's questions are answered; None if the calls are awaited."""
        self._session, self._events = session, events
        self.chat = SimpleNamespace(completions=self._offer(ChatCompletions))
        self.responses, self.messages = self._offer(Responses), self._offer(Messages)

    def _offer(self, dialect: type[Dialect]) -> SimpleNamespace:
        create = partial(self._create, dialect)
        return SimpleNamespace(create=create if self._events is None else partial(_wait, self._events, create))

    async def _create(self, dialect: type[Dialect], **request: Any) -> Record:
        if request.get("stream"):
            raise ValueError("this client gives whole answers; with `serve_http` any client has streams")
        body = json.dumps({"model": "policy", **request}, default=_dump).encode()
        reply = dialect(dialect.read(body), secrets.token_hex(12))
        outcome = await self._session.answer(reply.question)
        reply.prompt_tokens = outcome.prompt_tokens
        return json.loads(json.dumps(reply.write(outcome.answers)), object_hook=Record)


def _wait(events: asyncio.AbstractEventLoop, create: Any, **request: Any) -> Record:
    """Wait for an answer, in the thread of a plain function."""
    return asyncio.run_coroutine_threadsafe(create(**request), events).result()


def _dump(value: Any) -> Any:
    """Convert what clients send back as they received it."""
    if hasattr(value, "model_dump"):
        return value.model_dump(exclude_none=True)
    raise TypeError(f"a request holds {type(value).__name__}, which is no JSON")


async def agent(
    episode: Episode,
    *,
    run: str,
    arguments: dict[str, Any] = {},  # noqa: B006  (never changed)
    parser: str = "hermes",
    serve_http: bool = False,
    untrained: list[str] = ["aux"],  # noqa: B006
    max_turns: PositiveInt = 500,
    gateway: GatewayConfig = LOOPBACK,
) -> None:
    """Run a person's function ``run(client, row, **arguments)`` with the policy behind ``client``.

    ``run`` is the dotted path of a plain or async function. ``client`` has the methods of OpenAI's and Anthropic's
    clients (see AgentClient); an async function awaits them. With ``serve_http`` the function gets the address of an
    HTTP endpoint instead, for its own clients (``base_url``) or for other programs; ``gateway`` says where that is
    (see GatewayConfig). A number that the function returns is the reward.

    ``parser``: the format of the model's tool calls. The policy is asked, and not trained, under the model names
    ``untrained``. An episode that has no room for another token, or has had ``max_turns``, refuses further questions;
    it keeps its turns (TRUNCATED) even if the function dies of that.
    """
    fn = resolve(run, _HOME)
    settings = bind(fn, arguments, "rollout.arguments")
    session = EpisodeSession(episode, parser, untrained, max_turns)
    try:
        if serve_http:
            from coalign_agents.gateway import join_gateway

            async with join_gateway(gateway) as server:
                with server.admit(session) as key:
                    value = await call_function(fn, f"{server.address}/{key}/v1", episode.row, **settings)
        else:
            events = None if inspect.iscoroutinefunction(fn) else asyncio.get_running_loop()
            value = await call_function(fn, AgentClient(session, events), episode.row, **settings)
    except Exception:
        if not episode.is_cut:
            raise
        episode.count("agent_died")
        return
    if value is not None:
        episode.reward(value)


def _check_agent(
    samples: Mapping[str, int],
    *,
    run: str,
    arguments: Mapping[str, Any],
    parser: str,
    serve_http: bool,
    **_: Any,
) -> None:
    bind(resolve(run, _HOME), arguments, "rollout.arguments")
    check_format(parser)
    if serve_http:
        import coalign_agents.gateway  # noqa: F401  (ImportError names what an HTTP server needs)


agent.check = _check_agent
