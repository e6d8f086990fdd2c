"""What a turn of the policy answers, in the words of APIs."""

from __future__ import annotations

import json
from hashlib import blake2b

from coalign.environments.tree import Turn
from coalign.types import Status
from coalign_serve.dialects.question import Answer, Question, ToolCall
from coalign_serve.formats import AnswerFormat
from coalign_serve.serving.text_stream import cut_at_stop

PROMPT_END = 64  # tokens at the end of a prompt that tell how an answer begins
_ID_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


def read_answer(
    turn: Turn, question: Question, read: AnswerFormat | None, prompt_end: str, seed: str
) -> tuple[Answer, int]:
    """Return what a turn answers, and how many of its tool calls cannot be read; with one of these it stays text.

    The text ends before the stop string that has ended the turn. A turn that was cut calls no tools. ``read``: the
    format of the answer; None if nobody reads calls. ``seed`` and the place of a call determine its id.
    """
    text = cut_at_stop(turn.text, question.stop)
    if read is None or turn.status != Status.OK:
        return Answer(text, "stop" if turn.status == Status.OK else "length", tokens=len(turn.tokens)), 0
    parsed = read(turn, question.tools, prompt_end)
    unreadable = sum(call.error is not None for call in parsed.calls)
    if unreadable or (parsed.calls and not question.offers_tools):
        return Answer(text, "stop", tokens=len(turn.tokens)), unreadable if question.offers_tools else 0
    calls = [
        ToolCall(make_call_id(seed, i), call.name, json.dumps(call.arguments, ensure_ascii=False))
        for i, call in enumerate(parsed.calls)
    ]
    text = cut_at_stop(parsed.text, question.stop)
    return Answer(text, "tool_calls" if calls else "stop", parsed.reasoning, calls, len(turn.tokens)), 0


def make_call_id(seed: str, number: int) -> str:
    """Return nine letters and digits, as the strictest templates require; equal ones for equal arguments."""
    digest = int.from_bytes(blake2b(f"{seed}/{number}".encode(), digest_size=8).digest(), "little")
    return "".join(_ID_LETTERS[digest // 36**place % 36] for place in range(9))
