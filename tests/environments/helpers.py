"""A policy that says what it is told to, and what plays episodes with it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from coalign.data.messages import ReasoningPolicy
from coalign.data.templates import load_template
from coalign.environments.episode import Episode
from coalign.environments.loop import EnvironmentBatch, EnvironmentFunction, EnvironmentLoop
from coalign.environments.rendering import Rendering
from coalign.environments.tree import EpisodeRow
from coalign.types import Response, Status
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.eos_token_id
TOOLS_CHATML = (
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def encode(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


class Script:
    """A Policy. What it says: texts, which end by themselves, or lists of tokens as they are."""

    def __init__(self, says: Iterable[str | list[int]], capacity: int | None = None, delay: float = 0.0) -> None:
        self.says = list(says)
        self.capacity = capacity
        self.delay = delay
        self.asked: list[dict[str, Any]] = []
        self.forgotten: list[tuple[int, int]] = []

    async def respond(self, tokens: list[int], **asked: Any) -> Response:
        self.asked.append({"tokens": tokens, **asked})
        await asyncio.sleep(self.delay)
        said = self.says.pop(0)
        answer = [*encode(said), END] if isinstance(said, str) else said
        answer = answer[: asked["limit"]]
        logprobs = -torch.arange(1, len(answer) + 1) / 8
        status = Status.OK if answer[-1] == END else Status.TRUNCATED
        return Response(torch.tensor(answer), logprobs, torch.full((len(answer),), 4), status)

    def forget(self, group: int, index: int) -> None:
        self.forgotten.append((group, index))

    def decode(self, tokens: Sequence[int], *, special: bool) -> str:
        return TOKENIZER.decode(tokens, skip_special_tokens=not special)


def rendering(chat_template: str = TOOLS_CHATML, reasoning: ReasoningPolicy | None = None) -> Rendering:
    return Rendering(load_template(tiny_tokenizer(), chat_template, reasoning=reasoning))


def episode(
    *says: str | list[int],
    index: int = 0,
    group: int = 5,
    max_new_tokens: int = 1000,
    policy: Script | None = None,
    chat_template: str = TOOLS_CHATML,
    reasoning: ReasoningPolicy | None = None,
    **row: Any,
) -> Episode:
    row = {"messages": [{"role": "user", "content": "What is 2+3?"}], "answer": "5", **row}
    renders = rendering(chat_template, reasoning)
    return Episode(
        row=row,
        group=group,
        index=index,
        seed=3,
        prompt=renders.template.prompt(row["messages"], None),
        max_new_tokens=max_new_tokens,
        policy=policy or Script(says),
        rendering=renders,
    )


def play(
    fn: Any, *episodes: Episode, timeout: float = 20.0, min_groups: int | None = None, **arguments: Any
) -> EnvironmentBatch:
    """The environment played to its end with each episode."""
    loop = EnvironmentLoop()
    try:
        running = EnvironmentBatch(loop, {"": EnvironmentFunction(fn, arguments, timeout)}, episodes, min_groups)
        while not running.done:
            running.wait()
        return running
    finally:
        loop.close()


def played(fn: Any, one: Episode, **arguments: Any) -> Episode:
    """The episode after the environment; an error of the environment is raised."""
    running = play(fn, one, **arguments)
    if running.calls[0].error is not None:
        raise running.calls[0].error
    return one


def chosen(one: Episode | EpisodeRow) -> str:
    """What the policy is trained on in a row (of an episode: in its first one), as text."""
    row = one if isinstance(one, EpisodeRow) else one.rows[0]
    return TOKENIZER.decode([token for token, mask in zip(row.tokens, row.loss_mask, strict=True) if mask])
