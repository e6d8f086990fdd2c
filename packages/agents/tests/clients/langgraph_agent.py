"""An agent of LangGraph that adds, with OpenAI's client, or Anthropic's (`anthropic`)."""

import sys

from langchain_core.tools import tool
from langgraph.prebuilt import create_react_agent

if "anthropic" in sys.argv:
    from langchain_anthropic import ChatAnthropic as Chat
else:
    from langchain_openai import ChatOpenAI as Chat


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


agent = create_react_agent(Chat(model="policy"), [add], prompt="You add.")
answer = agent.invoke({"messages": [("user", "2+3?")]})["messages"][-1].content
assert answer == "It is 5.", answer
