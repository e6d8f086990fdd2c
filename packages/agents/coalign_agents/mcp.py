"""Tools of MCP servers for `tool_use`: `{mcp: {command: [python, server.py]}}` or `{mcp: {url: "http://…/mcp"}}`.

A server has state, so each episode has its own. With ``share: true`` one serves the whole run.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from tempfile import TemporaryFile
from typing import Any
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ConfigDict, Field, model_validator

from coalign.config.functions import bind, is_code_refused
from coalign.environments.episode import Episode
from coalign.processes.function_process import ProcessDied
from coalign.services import ServiceError
from coalign_agents.calls import limit_time
from coalign_serve.formats import ToolError

_shared: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, McpServer]] = WeakKeyDictionary()
_LITERALS = ("const", "default", "enum", "examples")  # keys of JSON Schema whose values are no schemas


class McpSettings(BaseModel):
    """How a server is reached: a ``command`` that speaks MCP on stdin and stdout, or a ``url``."""

    model_config = ConfigDict(extra="forbid")
    command: list[str] = Field(default=[], min_length=1)
    env: dict[str, str] = {}  # beside HOME, PATH and the like, which is all that servers see of the run's environment
    cwd: str | None = None
    url: str | None = None

    @model_validator(mode="after")
    def _check(self) -> McpSettings:
        if bool(self.command) == bool(self.url) or (self.url and (self.env or self.cwd)):
            raise ValueError("expected `command` (with `env` and `cwd`, if need be) or `url`")
        return self


class McpServer:
    """A connection to a server. Its own task holds it, since anyio's scopes cancel the task that entered them."""

    def __init__(self, *, mcp: McpSettings, share: bool = False) -> None:
        self.settings, self.share = mcp, share
        self.title = mcp.url or shlex.join(mcp.command)
        self._task: asyncio.Task[None] | None = None

    @staticmethod
    def build(config: Mapping[str, Any], config_key: str) -> McpServer:
        """Read {mcp: …, share: …}; starts nothing. Raises ConfigError, ValueError, or ImportError without `mcp`."""
        try:
            import mcp  # noqa: F401
        except ModuleNotFoundError:
            raise ImportError(
                f"{config_key}.mcp needs mcp, which is not installed: pip install 'coalign[mcp]'"
            ) from None
        server = McpServer(**bind(McpServer, config, config_key))
        for program in server.settings.command[:1]:
            if is_code_refused():
                raise ValueError(f"{config_key}.mcp.command starts a program; with --no-code only `url` is allowed")
            if "/" not in program and shutil.which(program) is None:
                raise ValueError(f"{config_key}.mcp.command: there is no program '{program}' in PATH")
        return server

    async def start(self) -> list[McpTool]:
        """Connect, unless connected, and list the tools. Raises RuntimeError, or ServiceError for a `url`."""
        if self._task is None or self._task.done():
            self._tools: asyncio.Future[list[McpTool]] = asyncio.get_running_loop().create_future()
            self._tools.add_done_callback(lambda tools: tools.cancelled() or tools.exception())  # nobody may wait
            self._task = asyncio.create_task(self._connect())
        return await asyncio.shield(self._tools)

    async def close(self) -> None:
        if self._task is not None:
            self._tools.cancel()
            self._task.cancel()
            await asyncio.wait([self._task])

    async def call(self, name: str, arguments: Mapping[str, Any], seconds: float) -> Any:
        """Call a tool; a lost server is started again by the next call. Raises CallTimeout, and what MCP's client does.

        A server that ends during the call is ProcessDied, or ServiceError if it has a `url`.
        """
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        await self.start()
        task = self._task
        try:
            return await limit_time(self._client.call_tool(name, dict(arguments)), seconds)
        except MCPError as error:
            if error.code != CONNECTION_CLOSED or task is None:
                raise
            task.cancel()
            await asyncio.wait([task])
            raise (ServiceError if self.settings.url else ProcessDied)(
                f"the MCP server `{self.title}` ended"
            ) from error

    async def _connect(self) -> None:
        from mcp import Client, StdioServerParameters, stdio_client

        target, settings = self.settings.url, self.settings
        with TemporaryFile("w+", errors="replace") as log:
            if target is None:
                program, *arguments = settings.command
                parameters = StdioServerParameters(command=program, args=arguments, env=settings.env, cwd=settings.cwd)
                target = stdio_client(parameters, errlog=log)
            try:
                async with Client(target) as self._client:
                    page = await self._client.list_tools()
                    tools = [*page.tools]
                    while page.next_cursor:
                        page = await self._client.list_tools(cursor=page.next_cursor)
                        tools += page.tools
                    self._tools.set_result([McpTool(self, tool) for tool in tools])
                    await asyncio.Event().wait()
            except Exception as error:
                while isinstance(error, ExceptionGroup):
                    error = error.exceptions[0]
                if not self._tools.done():
                    log.seek(0)
                    reason = (log.read().strip().splitlines() or [f"{type(error).__name__}: {error}"])[-1]
                    failure = ServiceError if settings.url else RuntimeError
                    self._tools.set_exception(failure(f"the MCP server `{self.title}` does not start: {reason}"))


class McpTool:
    """A tool of a server, as the policy sees it; its ``description`` has the form of chat templates."""

    def __init__(self, server: McpServer, tool: Any) -> None:
        self.server, self.name = server, tool.name
        about = {"name": tool.name, "description": tool.description or "", "parameters": _strip(tool.input_schema)}
        self.description: Mapping[str, Any] = {"type": "function", "function": about}

    async def __call__(
        self, episode: Episode, arguments: Mapping[str, Any], seconds: float
    ) -> str | list[dict[str, Any]]:
        """The result as text, or as parts if there are images. Raises ToolError for a failure, and what `call` does."""
        result = await self.server.call(self.name, arguments, seconds)
        parts = [_read_content(content) for content in result.content]
        text = "\n".join(part["text"] for part in parts if "text" in part)
        if result.is_error:
            raise ToolError("raised", text)
        return text if all("text" in part for part in parts) else parts


def is_server(config: Any) -> bool:
    """Whether an entry of `tools` is an MCP server."""
    return isinstance(config, Mapping) and "mcp" in config


@contextlib.asynccontextmanager
async def open_servers(
    configs: Sequence[Any], episode: Episode, patience: float
) -> AsyncIterator[dict[int, list[McpTool]]]:
    """Start the servers among the ``configs`` of tools, and yield their tools by position.

    A `url` that does not answer is asked again for ``patience`` seconds.
    """
    servers = {
        i: McpServer.build(config, f"rollout.tools[{i}]") for i, config in enumerate(configs) if is_server(config)
    }
    shared = _shared.setdefault(asyncio.get_running_loop(), {})
    for i, server in servers.items():
        if server.share:
            servers[i] = shared.setdefault(server.settings.model_dump_json(), server)
    try:
        tools = await asyncio.gather(*(episode.call_service(server.start, patience) for server in servers.values()))
        yield dict(zip(servers, tools, strict=True))
    finally:
        await asyncio.gather(*(server.close() for server in servers.values() if not server.share))


def _read_content(content: Any) -> dict[str, Any]:
    if content.type == "image":
        return {"type": "image", "url": f"data:{content.mime_type};base64,{content.data}"}
    text = getattr(getattr(content, "resource", content), "text", None)
    return {"type": "text", "text": f"[{content.type}]" if text is None else text}


def _strip(schema: Any, names: bool = False) -> Any:
    """Strip titles, which come and go with a server's libraries, from a JSON Schema; ``names``: keys are properties."""
    if isinstance(schema, list):
        return [_strip(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: value if key in _LITERALS and not names else _strip(value, key in ("properties", "$defs") and not names)
        for key, value in schema.items()
        if names or key != "title"
    }
