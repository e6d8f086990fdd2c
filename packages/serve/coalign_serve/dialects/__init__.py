"""Three APIs in which programs ask a model: OpenAI's chat completions and Responses, Anthropic's Messages.

``question.py`` has what they have in common: a Question, an Answer, and the Dialect that reads the one and writes the
other. `coalign serve` and the gateway of coalign-agents speak all three.
"""

from coalign_serve.dialects.chat import ChatCompletions
from coalign_serve.dialects.messages import Messages
from coalign_serve.dialects.question import Answer, Dialect, Question, ToolCall
from coalign_serve.dialects.responses import Responses

DIALECTS: tuple[type[Dialect], ...] = (ChatCompletions, Responses, Messages)

__all__ = ["DIALECTS", "Answer", "ChatCompletions", "Dialect", "Messages", "Question", "Responses", "ToolCall"]
