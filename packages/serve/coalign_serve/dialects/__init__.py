"""Three APIs in which programs ask a model: OpenAI's chat completions and Responses, Anthropic's Messages.

``question.py`` has what they have in common: a Question, an Answer, and the Dialect that reads the one and writes the
other. `coalign serve` and the gateway of coalign-agents speak all three.
"""

from typing import Any

from coalign_serve.dialects.chat import ChatCompletions
from coalign_serve.dialects.messages import Messages
from coalign_serve.dialects.question import Answer, Dialect, Question, ToolCall
from coalign_serve.dialects.responses import Responses

DIALECTS: tuple[type[Dialect], ...] = (ChatCompletions, Responses, Messages)

__all__ = [
    "DIALECTS",
    "Answer",
    "ChatCompletions",
    "Dialect",
    "Messages",
    "Question",
    "Responses",
    "ToolCall",
    "describe_error",
    "describe_model",
]


def describe_error(path: str, status: int, message: str) -> dict[str, Any]:
    """Return an error in the dialect of the path; elsewhere in that of chat completions."""
    named = next((dialect for dialect in DIALECTS if dialect.path in path), ChatCompletions)
    return named.describe_error(status, message)


def describe_model(name: str, created: int = 0, **more: Any) -> dict[str, Any]:
    """Return a model as OpenAI's and Anthropic's lists have it. ``created``: seconds since 1970."""
    head = {"id": name, "object": "model", "type": "model", "display_name": name}
    return {**head, "created": created, "owned_by": "coalign", **more}
