"""An MCP server for tests, on stdin and stdout, or on a port: `mcp_server.py [PORT]`."""

import asyncio
import os
import sys
from typing import Literal

from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("tests")
calls = 0


@server.tool()
def add(a: int, title: Literal["x", "y"] = "x", b: int = 2) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def count() -> str:
    """Counts calls of this process."""
    global calls
    calls += 1
    return f"{calls}"


@server.tool()
def pid() -> str:
    return str(os.getpid())


@server.tool()
def fails() -> str:
    raise ValueError("no luck")


@server.tool()
async def sleeps(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "awake"


@server.tool()
def exits() -> str:
    os._exit(3)


@server.tool()
def draws() -> list:
    return ["A drawing: ", Image(data=b"png", format="png")]


sys.stderr.write("a line of the log\n")
if sys.argv[1:] == ["broken"]:
    raise RuntimeError("no key")
if sys.argv[1:]:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run("stdio")
