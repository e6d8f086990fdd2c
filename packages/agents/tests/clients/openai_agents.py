"""An agent of openai-agents that adds; with `handoff` it may pass the question on."""

import asyncio
import sys

from agents import Agent, Runner, function_tool


@function_tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


critic = Agent(name="critic", instructions="You criticise.", model="policy")
handoffs = [critic] if "handoff" in sys.argv else []
agent = Agent(name="main", instructions="You add.", tools=[add], model="policy", handoffs=handoffs)
asyncio.run(Runner.run(agent, "2+3?"))
