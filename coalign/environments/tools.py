"""Python functions as tools: their description for the policy, and what comes of its calls.

A tool is a function, plain or async. Its positional parameters, with annotations, are what the policy gives; its
docstring says what it does. Keyword-only parameters are configuration. A first parameter called ``episode`` gets the
Episode (for state that belongs to it, or its random numbers).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from coalign.config.functions import bind, resolve
from coalign.environments.calculator import calculator
from coalign.environments.conversation import call_function
from coalign.environments.episode import Episode
from coalign.environments.parsers import ToolError, ToolRequest
from coalign.environments.rendering import format_call_id

__all__ = ["calculator"]


@dataclass(frozen=True)
class Tool:
    """A function that the policy may call."""

    name: str
    fn: Callable[..., Any]
    takes: type[BaseModel]
    description: Mapping[str, Any]  # as chat templates expect it: {"type": "function", "function": {…}}
    of_episode: bool = False
    configuration: Mapping[str, Any] = field(default_factory=dict)

    async def __call__(self, episode: Episode, arguments: Mapping[str, Any]) -> str:
        """The result as a text. Raises ToolError for arguments that do not fit, and whatever the function raises."""
        try:
            given = self.takes.model_validate(arguments)
        except ValidationError as error:
            raise ToolError("bad_arguments", _first_problem(error)) from error
        values = {name: getattr(given, name) for name in self.takes.model_fields}
        first = [episode] if self.of_episode else []
        result = await call_function(self.fn, *first, **values, **self.configuration)
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def build_tool(config: str | Mapping[str, Any], where: str = "rollout.tools[0]") -> Tool:
    """The tool that a configuration names: a short name of this module or a dotted path, or {fn: …, its arguments}.

    Raises ConfigError for wrong arguments, ValueError where there is no such function; ``where`` is the key.
    """
    given = {"fn": config} if isinstance(config, str) else config
    if not isinstance(given, Mapping) or not isinstance(given.get("fn"), str):
        raise ValueError(f"{where} is {config!r:.60}; expected the name of a function, or a mapping with `fn`")
    try:
        fn = resolve(given["fn"], "coalign.environments.tools")
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    name, takes, description, of_episode = _describe(fn)
    arguments = {key: value for key, value in given.items() if key != "fn"}
    return Tool(name, fn, takes, description, of_episode, bind(fn, arguments, where))


@functools.cache
def _describe(fn: Callable[..., Any]) -> tuple[str, type[BaseModel], dict[str, Any], bool]:
    """Name, model of the arguments, JSON Schema, and whether it wants the episode."""
    hints = get_type_hints(fn, include_extras=True)
    given = [p for p in inspect.signature(fn).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    of_episode = bool(given) and given[0].name == "episode"
    parameters = {
        p.name: (hints.get(p.name, Any), ... if p.default is p.empty else p.default) for p in given[of_episode:]
    }
    takes = create_model(fn.__name__, __config__=ConfigDict(extra="forbid"), **parameters)
    schema = takes.model_json_schema()
    properties = {
        name: {key: value for key, value in about.items() if key != "title"}
        for name, about in schema.get("properties", {}).items()
    }
    shape = {"type": "object", "properties": properties, "required": schema.get("required", [])}
    if "$defs" in schema:
        shape["$defs"] = schema["$defs"]
    about = {"name": fn.__name__, "description": inspect.getdoc(fn) or "", "parameters": shape}
    return fn.__name__, takes, {"type": "function", "function": about}, of_episode


@dataclass(frozen=True)
class Toolbox:
    """Several tools, with the limits on one call: ``timeout`` in seconds, ``max_chars`` of its result."""

    tools: Mapping[str, Tool]
    timeout: float
    max_chars: int

    @staticmethod
    def of(configs: Sequence[str | Mapping[str, Any]], *, timeout: float, max_chars: int) -> Toolbox:
        """Raises what `tool` raises, and ValueError for two tools of the same name."""
        tools = [build_tool(config, f"rollout.tools[{i}]") for i, config in enumerate(configs)]
        names = [each.name for each in tools]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise ValueError(f"rollout.tools[{i}]: a second tool is called '{name}'; the policy tells them by name")
        return Toolbox({each.name: each for each in tools}, timeout, max_chars)

    @property
    def descriptions(self) -> list[dict[str, Any]]:
        return [dict(each.description) for each in self.tools.values()]

    async def answer(self, episode: Episode, calls: Sequence[ToolRequest]) -> list[dict[str, Any]]:
        """The tools' messages, in the order of the calls, which run side by side. A failure is a message, too; it is
        counted (`episode/tool_failed/<reason>`)."""
        results = await asyncio.gather(*(self._answer(episode, each) for each in calls))
        return [
            {"role": "tool", "tool_call_id": format_call_id(i), "name": each.name or "tool", "content": result}
            for i, (each, result) in enumerate(zip(calls, results, strict=True))
        ]

    async def _answer(self, episode: Episode, asked: ToolRequest) -> str:
        episode.count("tool_calls")
        try:
            result = await self._result(episode, asked)
        except ToolError as error:
            episode.count(f"tool_failed/{error.reason}")
            result = f"Error: {error}"
        if len(result) > self.max_chars:
            result = f"{result[: self.max_chars]}… ({len(result)} characters)"
        return result

    async def _result(self, episode: Episode, asked: ToolRequest) -> str:
        if asked.error is not None:
            raise asked.error
        if asked.name not in self.tools:
            raise ToolError("unknown_tool", f"there is no tool '{asked.name}'; there are: {', '.join(self.tools)}")
        try:
            async with asyncio.timeout(self.timeout) as limit:
                return await self.tools[asked.name](episode, asked.arguments)
        except ToolError:
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                raise ToolError("timeout", f"no result within {self.timeout:g} s") from error
            raise ToolError("raised", f"{type(error).__name__}: {error}") from error


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    where = ".".join(map(str, problem["loc"]))
    return f"argument '{where}': {problem['msg']}"
