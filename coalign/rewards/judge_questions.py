"""How a judge model is used: the questions about the responses to a prompt, and the rewards that its answers mean.

Companions bring classes for `models.judge.judge: {fn: pairwise}`; one of your own is named by its dotted path
(``my.pkg:Class``), and its keyword-only arguments are configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from coalign.data.images.placeholders import list_image_parts, write_markers
from coalign.data.messages import format_prompt
from coalign.types import Sample

__all__: list[str] = []  # what `judge.fn` can name comes from companions

Messages = list[dict[str, Any]]


class JudgeQuestions(Protocol):
    """How a judge is used. An answer that cannot be read is never a reward: a response without one fails."""

    def ask(self, group: Sequence[Sample]) -> list[Messages]:
        """The questions about the responses to one prompt."""
        ...

    def verdict(self, answer: str) -> float | None:
        """Read one answer as a number, 0 .. 1; None if it cannot be read."""
        ...

    def rewards(self, responses: int, verdicts: Sequence[float | None]) -> list[float | None]:
        """The reward of each response from the verdicts on the group's questions, in order; None: it has none."""
        ...


def name_images(samples: Sequence[Sample]) -> list[Sample]:
    """Return samples whose prompts say `<image>` where an image stands, for a judge that reads text alone."""
    return [
        replace(sample, meta=sample.meta | {"prompt": format_prompt(write_markers(messages))})
        if list_image_parts(messages := sample.meta.get("messages") or [])
        else sample
        for sample in samples
    ]
