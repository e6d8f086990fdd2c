"""The environment in which a policy may call tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coalign.config.functions import resolve
from coalign.environments.episode import Episode
from coalign.environments.parsers import ToolRequest
from coalign.environments.rendering import format_call_id
from coalign.environments.tools import Toolbox
from coalign.types import Status


async def tool_use(
    episode: Episode,
    *,
    tools: list[Any],
    parser: str = "hermes",
    max_turns: int = 8,
    tokens_per_turn: int | None = None,
    tool_timeout: float = 30.0,
    max_result_chars: int = 4000,
) -> None:
    """Let the policy call tools and read their results, turn after turn, until a turn calls none, or for ``max_turns``.

    The chat template shows the tools in the prompt. ``parser`` is the format of the calls: a function of
    coalign.environments.parsers, or a dotted path. The calls of one turn run concurrently. A call that cannot be read,
    an unknown tool, wrong arguments, an exception, or no result within ``tool_timeout`` seconds is reported to the
    policy, and counted. A truncated turn calls nothing.
    """
    read = resolve(parser, "coalign.environments.parsers")
    box = Toolbox.build(tools, timeout=tool_timeout, max_chars=max_result_chars)
    episode.begin(tools=box.descriptions)
    for turns_left in reversed(range(max_turns)):
        turn = await episode.generate(max_new_tokens=tokens_per_turn)
        text, calls = read(turn) if turn.status == Status.OK else (turn.text, [])
        if not calls:
            return
        episode.messages[-1] = _to_message(text, calls)
        if not turns_left:
            episode.count("out_of_turns")
            return
        episode.say(*await box.answer(episode, calls))


def _check(
    samples: Mapping[str, int], *, tools: list[Any], parser: str, tool_timeout: float, max_result_chars: int, **_: Any
) -> None:
    resolve(parser, "coalign.environments.parsers")
    Toolbox.build(tools, timeout=tool_timeout, max_chars=max_result_chars)


tool_use.check, tool_use.shows_tools = _check, True


def _to_message(text: str, calls: list[ToolRequest]) -> dict[str, Any]:
    readable = [
        {
            "id": format_call_id(i),
            "type": "function",
            "function": {"name": call.name, "arguments": dict(call.arguments)},
        }
        for i, call in enumerate(calls)
        if call.error is None
    ]
    return {"role": "assistant", "content": text, "tool_calls": readable}
