"""Python functions as tools: their descriptions for the policy, its calls, and the environment that answers them.

A tool is a plain or async function. Its annotated positional parameters are the arguments that the policy gives, its
docstring describes it to the policy, and keyword-only parameters are configuration. A first parameter called
``episode`` gets the Episode, for its state or random numbers. Without it, a user's plain function runs in child
processes, which may hang or die.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, ValidationError, create_model

from coalign.config.functions import bind, resolve
from coalign.data.images.placeholders import read_part
from coalign.environments.episode import Episode
from coalign.environments.rendering import format_call_id
from coalign.processes.function_process import ProcessDied
from coalign.services import PATIENCE, ServiceError
from coalign.threads import CallTimeout
from coalign.types import Status
from coalign_agents.calculator import calculator
from coalign_agents.calls import call_function, call_isolated, limit_time
from coalign_agents.mcp import McpServer, McpTool, is_server, open_servers
from coalign_serve.formats import ParsedAnswer, ToolError, ToolRequest, check_format, find_format

__all__ = ["calculator"]

_PROMPT_END = 32  # tokens before a turn that a format reads: the header of an answer and the beginning of its reasoning


@dataclass(frozen=True)
class _Tool:
    """A function that the policy may call; the configuration names it ``path``."""

    name: str
    path: str
    fn: Callable[..., Any]
    arguments: type[BaseModel]
    description: Mapping[str, Any]  # as chat templates expect it: {"type": "function", "function": {…}}
    takes_episode: bool = False
    configuration: Mapping[str, Any] = field(default_factory=dict)

    async def __call__(
        self, episode: Episode, arguments: Mapping[str, Any], seconds: float
    ) -> str | list[dict[str, Any]]:
        """The result as text, or as parts of content if there are images among them.

        Raises ToolError for arguments that do not fit, and what `call_isolated` raises."""
        try:
            checked = self.arguments.model_validate(arguments)
        except ValidationError as error:
            problem = error.errors()[0]
            path = ".".join(map(str, problem["loc"]))
            raise ToolError("bad_arguments", f"argument '{path}': {problem['msg']}") from error
        values = [getattr(checked, name) for name in self.arguments.model_fields]
        if self.takes_episode:
            call = call_function(self.fn, episode, *values, **self.configuration)
            result = await limit_time(call, seconds)
        else:
            result = await call_isolated(self.path, self.fn, values, self.configuration, seconds)
        return _format_result(result)


def _format_result(result: Any) -> str | list[dict[str, Any]]:
    """Convert a result to parts if it is an image or a list with images, else to text (JSON unless it is a text)."""
    if isinstance(result, str):
        return result
    several = result if isinstance(result, list) else [result]
    if any(isinstance(part, Mapping) and read_part(part) is not None for part in several):
        return [dict(part) if isinstance(part, Mapping) else {"type": "text", "text": str(part)} for part in several]
    return json.dumps(result, ensure_ascii=False, default=str)


def _build_tool(config: str | Mapping[str, Any], config_key: str = "rollout.tools[0]") -> _Tool:
    """Build the tool that a configuration names: a short name, a dotted path, or {fn: …, its configuration}.

    A short name is one of this module. Raises ConfigError for wrong arguments, ValueError for an unknown function;
    ``config_key`` is the configuration key for messages.
    """
    settings = {"fn": config} if isinstance(config, str) else config
    if not isinstance(settings, Mapping) or not isinstance(settings.get("fn"), str):
        raise ValueError(f"{config_key} is {config!r:.60}; expected the name of a function, or a mapping with `fn`")
    try:
        fn = resolve(settings["fn"], "coalign_agents.tools")
    except ValueError as error:
        raise ValueError(f"{config_key}: {error}") from error
    model, description, takes_episode = _describe(fn)
    arguments = {key: value for key, value in settings.items() if key != "fn"}
    return _Tool(fn.__name__, settings["fn"], fn, model, description, takes_episode, bind(fn, arguments, config_key))


@functools.cache
def _describe(fn: Callable[..., Any]) -> tuple[type[BaseModel], dict[str, Any], bool]:
    """(model of the arguments, description in JSON Schema, whether the function takes the episode)."""
    hints = get_type_hints(fn, include_extras=True)
    positional = [p for p in inspect.signature(fn).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    takes_episode = bool(positional) and positional[0].name == "episode"
    parameters: dict[str, Any] = {
        p.name: (hints.get(p.name, Any), ... if p.default is p.empty else p.default) for p in positional[takes_episode:]
    }
    model = create_model(fn.__name__, __config__=ConfigDict(extra="forbid"), **parameters)
    schema = model.model_json_schema()
    properties = {
        name: {key: value for key, value in about.items() if key != "title"}
        for name, about in schema.get("properties", {}).items()
    }
    shape = {"type": "object", "properties": properties, "required": schema.get("required", [])}
    if "$defs" in schema:
        shape["$defs"] = schema["$defs"]
    about = {"name": fn.__name__, "description": inspect.getdoc(fn) or "", "parameters": shape}
    return model, {"type": "function", "function": about}, takes_episode


@dataclass(frozen=True)
class _Toolbox:
    """Several tools, with the limits on one call: ``timeout`` in seconds, ``max_chars`` of its result.

    A tool that raises ServiceError is called again for ``patience`` seconds.
    """

    tools: Mapping[str, _Tool | McpTool]
    timeout: float
    max_chars: int
    patience: float = PATIENCE

    @staticmethod
    def build(
        configs: Sequence[str | Mapping[str, Any]],
        served: Mapping[int, Sequence[McpTool]] = {},
        *,
        timeout: float,
        max_chars: int,
        patience: float = PATIENCE,
    ) -> _Toolbox:
        """Build every tool but those ``served`` by MCP servers, by their positions among the ``configs``.

        Raises what `_build_tool` raises, and ValueError for two tools of the same name.
        """
        tools: dict[str, _Tool | McpTool] = {}
        for i, config in enumerate(configs):
            key = f"rollout.tools[{i}]"
            for tool in served[i] if i in served else [_build_tool(config, key)]:
                if tool.name in tools:
                    raise ValueError(f"{key}: a second tool is called '{tool.name}'; the policy tells them by name")
                tools[tool.name] = tool
        return _Toolbox(tools, timeout, max_chars, patience)

    @property
    def descriptions(self) -> list[dict[str, Any]]:
        return [dict(tool.description) for tool in self.tools.values()]

    async def answer(self, episode: Episode, calls: Sequence[ToolRequest]) -> list[dict[str, Any]]:
        """The tools' messages, in the order of the calls, which run concurrently.

        A failed call gets a message too, and is counted in `episode/tool_failed/<reason>`.
        """
        results = await asyncio.gather(*(self._answer_call(episode, call) for call in calls))
        return [
            {"role": "tool", "tool_call_id": format_call_id(i), "name": call.name or "tool", "content": result}
            for i, (call, result) in enumerate(zip(calls, results, strict=True))
        ]

    async def _answer_call(self, episode: Episode, request: ToolRequest) -> str | list[dict[str, Any]]:
        episode.count("tool_calls")
        try:
            result = await self._call_tool(episode, request)
        except ToolError as error:
            episode.count(f"tool_failed/{error.reason}")
            result = f"Error: {error}"
        if isinstance(result, str):
            return self._shorten(result)
        return [part | {"text": self._shorten(part["text"])} if "text" in part else part for part in result]

    def _shorten(self, text: str) -> str:
        return text if len(text) <= self.max_chars else f"{text[: self.max_chars]}… ({len(text)} characters)"

    async def _call_tool(self, episode: Episode, request: ToolRequest) -> str | list[dict[str, Any]]:
        if request.error is not None:
            raise request.error
        if request.name not in self.tools:
            raise ToolError("unknown_tool", f"there is no tool '{request.name}'; there are: {', '.join(self.tools)}")
        return await episode.call_service(lambda: self._call_once(episode, request), self.patience)

    async def _call_once(self, episode: Episode, request: ToolRequest) -> str | list[dict[str, Any]]:
        try:
            return await self.tools[request.name](episode, request.arguments, self.timeout)
        except (ToolError, ServiceError):
            raise
        except CallTimeout as error:
            raise ToolError("timeout", f"no result within {self.timeout:g} s") from error
        except ProcessDied as error:
            raise ToolError("died", str(error)) from error
        except Exception as error:
            raise ToolError("raised", f"{type(error).__name__}: {error}") from error


async def tool_use(
    episode: Episode,
    *,
    tools: list[Any],
    parser: str = "hermes",
    max_turns: int = 8,
    tokens_per_turn: int | None = None,
    tool_timeout: float = 30.0,
    patience: NonNegativeFloat = PATIENCE,
    max_result_chars: int = 4000,
) -> None:
    """Let the policy call tools and read their results, turn after turn, until a turn calls none, or for ``max_turns``.

    The chat template shows the tools in the prompt: functions, and those of MCP servers (coalign_agents.mcp), which are
    started for the episode. ``parser`` is the format of the calls: a name that coalign_serve.formats finds, or a dotted
    path. The calls of one turn run concurrently. A call that cannot be read,
    an unknown tool, wrong arguments, an exception, or no result within ``tool_timeout`` seconds is reported to the
    policy, and counted. A tool that raises ServiceError (coalign.services) is called again for ``patience`` seconds;
    then its episode is dropped. A truncated turn calls nothing.
    """
    tokenizer = episode.rendering.tokenizer
    parse = find_format(parser, tokenizer)
    async with open_servers(tools, episode, patience) as served:
        box = _Toolbox.build(tools, served, timeout=tool_timeout, max_chars=max_result_chars, patience=patience)
        episode.begin(tools=box.descriptions)
        for turns_left in reversed(range(max_turns)):
            turn = await episode.generate(max_new_tokens=tokens_per_turn)
            if turn.status != Status.OK:
                return
            answer = parse(turn, box.descriptions, tokenizer.decode(turn.added[-_PROMPT_END:]))
            if not answer.calls:
                return
            episode.messages[-1] = _to_message(answer)
            if not turns_left:
                episode.count("out_of_turns")
                return
            episode.say(*await box.answer(episode, answer.calls))


def _check_tools(
    samples: Mapping[str, int], *, tools: list[Any], parser: str, tool_timeout: float, max_result_chars: int, **_: Any
) -> None:
    check_format(parser)
    servers = {i: McpServer.build(config, f"rollout.tools[{i}]") for i, config in enumerate(tools) if is_server(config)}
    _Toolbox.build(tools, dict.fromkeys(servers, ()), timeout=tool_timeout, max_chars=max_result_chars)


tool_use.check, tool_use.shows_tools = _check_tools, True


def _to_message(answer: ParsedAnswer) -> dict[str, Any]:
    readable = [
        {
            "id": format_call_id(i),
            "type": "function",
            "function": {"name": call.name, "arguments": dict(call.arguments)},
        }
        for i, call in enumerate(answer.calls)
        if call.error is None
    ]
    reasoning = {"reasoning_content": answer.reasoning} if answer.reasoning else {}
    return {"role": "assistant", "content": answer.text, **reasoning, "tool_calls": readable}
