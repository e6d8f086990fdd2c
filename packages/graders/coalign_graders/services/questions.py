"""The questions that a judge model is asked about the responses to a prompt, and the rewards its answers mean.

Keyword-only arguments are configuration: `models.judge.judge: {fn: pairwise, opponents: 2}`. A class of your own with
the methods of JudgeQuestions is named by its dotted path (``my.pkg:Class``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from string import Formatter
from typing import Any, Protocol

from coalign.data.images.placeholders import list_image_parts
from coalign.data.messages import format_prompt
from coalign.types import Sample
from coalign_graders.checker import find_last
from coalign_graders.services.images import write_markers

NUMBER = re.compile(r"-?\d+(\.\d+)?")

GRADE = """Grade how well the response answers the user.

<user>
{prompt}
</user>

<response>
{response}
</response>

Say in a few sentences what is good and what is bad about it. Then write "Grade:" and a number from {low} (useless) to \
{high} (could not be better), and stop."""

COMPARE = """Which of two responses answers the user better? Neither their order nor their length matters.

<user>
{prompt}
</user>

<response {first_label}>
{first}
</response {first_label}>

<response {second_label}>
{second}
</response {second_label}>

Say in a few sentences what speaks for each of them. Then write "Verdict:" and {first_label}, {second_label} or {tie}, \
and stop."""


Messages = list[dict[str, Any]]
Verdict = float | list[float]  # a list: on each criterion
Reward = float | Mapping[str, float] | None


class JudgeQuestions(Protocol):
    """How a judge is used. An answer that cannot be read is never a reward: a response without one fails."""

    def ask(self, group: Sequence[Sample]) -> list[Messages]:
        """The questions about the responses to one prompt. BadRow: its row does not say what to ask."""
        ...

    def verdict(self, answer: str, group: Sequence[Sample]) -> Verdict | None:
        """Read one answer as a number, 0 .. 1, or several; None if it cannot be read."""
        ...

    def rewards(self, group: Sequence[Sample], verdicts: Sequence[Any]) -> Sequence[Reward]:
        """The reward of each response from the verdicts on the group's questions, in order; None: it has none.

        A mapping has it under `reward`, and further entries for the log.
        """
        ...


def name_images(samples: Sequence[Sample]) -> list[Sample]:
    """Return samples whose prompts say `<image>` where an image stands, for a judge that reads text alone."""
    return [
        replace(sample, meta=sample.meta | {"prompt": format_prompt(write_markers(messages))})
        if list_image_parts(messages := sample.meta.get("messages") or [])
        else sample
        for sample in samples
    ]


class Pointwise:
    """Grades each response by itself, scaled to 0 .. 1.

    ``template`` has the fields prompt, response, low and high. The first group of ``pattern``, where it matches last,
    is the grade; a number outside of ``low`` .. ``high`` is no grade, and what takes over a second to find is none.
    """

    def __init__(
        self,
        *,
        template: str = GRADE,
        low: float = 1.0,
        high: float = 10.0,
        pattern: str = r"grade\W*?(-?\d+(?:\.\d+)?)",
    ) -> None:
        check_template(template, {"prompt", "response", "low", "high"})
        if not low < high:
            raise ValueError(f"judge.low is {low} and judge.high is {high}: grades go from the lower to the higher")
        self.template, self.low, self.high = template, low, high
        self.pattern = check_pattern(pattern)

    def ask(self, group: Sequence[Sample]) -> list[Messages]:
        fields = {"low": f"{self.low:g}", "high": f"{self.high:g}"}
        return [user_message(self.template.format(prompt=prompt_text(s), response=s.response, **fields)) for s in group]

    def verdict(self, answer: str, group: Sequence[Sample] = ()) -> float | None:
        grade = find_last(self.pattern, answer)
        if not grade or not NUMBER.fullmatch(grade):
            return None
        share = (float(grade) - self.low) / (self.high - self.low)
        return share if 0.0 <= share <= 1.0 else None

    def rewards(self, group: Sequence[Sample], verdicts: Sequence[float | None]) -> list[float | None]:
        return list(verdicts)


class Pairwise:
    """Compares responses two at a time; the reward of each is the share of its comparisons that it wins, 0 .. 1.

    Each pair is judged in both orders and the two results (1, ½ or 0) are averaged, because judges tend to prefer the
    first response (2306.05685, section 3.3). If either answer cannot be read, the comparison does not count. Every
    response meets the ``opponents`` that follow it in the group (None: all others). With ``against`` it meets only the
    text under that key of the data set's row, and the reward does not depend on the rest of the group.

    ``template`` has the fields prompt, first, second, first_label, second_label and tie. The first group of
    ``pattern``, where it matches last, is the verdict: one of the two ``labels`` or ``tie``.
    """

    def __init__(
        self,
        *,
        template: str = COMPARE,
        labels: tuple[str, str] = ("A", "B"),
        tie: str = "tie",
        pattern: str = r"verdict\W*(\w+)",
        opponents: int | None = None,
        against: str | None = None,
    ) -> None:
        check_template(template, {"prompt", "first", "second", "first_label", "second_label", "tie"})
        if opponents is not None and opponents < 1:
            raise ValueError(f"judge.opponents is {opponents}: a response is compared with one other at least")
        if opponents is not None and against is not None:
            raise ValueError("judge.opponents and judge.against: a response is compared with others, or with the row's")
        self.template, self.labels, self.tie, self.opponents, self.against = template, labels, tie, opponents, against
        self.pattern = check_pattern(pattern)
        self.worth = {labels[0].lower(): 1.0, tie.lower(): 0.5, labels[1].lower(): 0.0}

    def ask(self, group: Sequence[Sample]) -> list[Messages]:
        matches = [(a, self._text(group, a), self._text(group, b)) for a, b in self.matches(len(group))]
        return [
            self._question(group[a], first, second)
            for a, one, two in matches
            for first, second in ((one, two), (two, one))
        ]

    def verdict(self, answer: str, group: Sequence[Sample] = ()) -> float | None:
        """1.0 if the response shown first is the better one, 0.0 if the second is, 0.5 for a tie."""
        label = find_last(self.pattern, answer)
        return self.worth.get(label.lower()) if label else None

    def rewards(self, group: Sequence[Sample], verdicts: Sequence[float | None]) -> list[float | None]:
        won, met = [0.0] * len(group), [0] * len(group)
        both = zip(verdicts[::2], verdicts[1::2], strict=True)
        for (a, b), (forth, back) in zip(self.matches(len(group)), both, strict=True):
            if forth is None or back is None:
                continue
            share = (forth + 1 - back) / 2  # what `a` wins when shown first, and what is left to it when shown second
            for response, won_here in ((a, share), (b, 1 - share)):
                if response is not None:
                    won[response] += won_here
                    met[response] += 1
        return [w / m if m else None for w, m in zip(won, met, strict=True)]

    def matches(self, responses: int) -> list[tuple[int, int | None]]:
        """The pairs: every response with the ``opponents`` next ones (cyclically), or with the row's text (None)."""
        if self.against is not None:
            return [(i, None) for i in range(responses)]
        reach = responses - 1 if self.opponents is None else min(self.opponents, responses - 1)
        pairs = [(i, (i + step) % responses) for i in range(responses) for step in range(1, reach + 1)]
        return sorted({(min(pair), max(pair)) for pair in pairs})

    def _text(self, group: Sequence[Sample], which: int | None) -> str:
        if which is not None:
            return group[which].response
        row = group[0].meta
        if (text := row.get(self.against or "")) is None:
            raise KeyError(f"judge.against: the row has no '{self.against}'; it has {sorted(row)}")
        return str(text)

    def _question(self, about: Sample, first: str, second: str) -> Messages:
        labels = {"first_label": self.labels[0], "second_label": self.labels[1], "tie": self.tie}
        return user_message(self.template.format(prompt=prompt_text(about), first=first, second=second, **labels))


def user_message(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def prompt_text(sample: Sample) -> str:
    """The prompt as people read it: that of the data set's row, else as the model saw it."""
    return sample.meta.get("prompt", sample.prompt)


def check_template(template: str, fields: set[str]) -> None:
    """Raise ValueError for a field in braces that is not one of ``fields``."""
    named = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
    if unknown := named - fields:
        raise ValueError(
            f"judge.template has the field {{{sorted(unknown)[0]}}}; there are {', '.join(sorted(fields))} (braces "
            "that are none are doubled: {{ }})"
        )


def check_pattern(pattern: str) -> str:
    """The pattern. Raises ValueError for one that Python's re cannot read; a process of its own matches it."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"judge.pattern is {pattern!r}: {error}") from None
    return pattern
