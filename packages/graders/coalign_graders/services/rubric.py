"""The judge question `rubric`: weighted criteria, and whether a response meets them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pydantic import PositiveInt

from coalign.data.sources import BadRow, is_number
from coalign.types import Sample
from coalign_graders.services.images import write_markers
from coalign_graders.services.questions import Messages, Reward, Verdict, check_template, prompt_text, user_message

_SHOWN = """<user>
{prompt}
</user>

<response>
{response}
</response>

"""

TOGETHER = (
    "Which criteria does the response meet?\n\n"
    + _SHOWN
    + """<criteria>
{criteria}
</criteria>

Write one line for each criterion and nothing else: its number, a colon, and {yes} if the response meets it or {no} if \
it does not."""
)

ALONE = (
    "Does the response meet the criterion?\n\n"
    + _SHOWN
    + """<criterion>
{criterion}
</criterion>

Answer with one word: {yes} or {no}."""
)


class Criterion(NamedTuple):
    """What a response should do; with a negative weight, a fault that costs."""

    text: str
    weight: float


class Rubric:
    """Asks whether a response meets weighted criteria; the reward is the weight met over the weight to be had.

    That is Σ weight · verdict / Σ positive weights, clipped to 0 .. 1: the score of HealthBench (2505.08775), which
    clips the mean over responses instead, and the explicit aggregation of Rubrics as Rewards (2507.17746).

    ``criteria``: texts (of weight 1) or {criterion, weight}, for all rows; None: they stand under ``key`` of the row.
    ``judged``: `together` asks one question about a response, to which the answer has a line for each number; if it
    misses one it cannot be read, and the response has no reward. `alone` asks a question for each criterion, whose
    verdict may be a probability (module `preference`). ``labels``: the words for met and not met.

    What is shown of an episode is its main conversation after the prompt, with calls and results of tools. Of a longer
    one than ``max_characters`` the beginning is left out, and the judge is told how much. ``template`` has the fields
    prompt, response, yes, no, and criteria (`together`) or criterion (`alone`).
    """

    def __init__(
        self,
        *,
        criteria: list[Any] | None = None,
        key: str = "rubric",
        judged: Literal["together", "alone"] = "together",
        template: str | None = None,
        labels: tuple[str, str] = ("yes", "no"),
        max_characters: PositiveInt = 24_000,
    ) -> None:
        self._together, self._key, self._max_characters = judged == "together", key, max_characters
        if template is not None:
            field = "criteria" if self._together else "criterion"
            check_template(template, {"prompt", "response", "yes", "no", field})
        self.template = template or (TOGETHER if self._together else ALONE)
        yes, no = (label.lower() for label in labels)
        if yes == no or not (re.fullmatch(r"\w+", yes) and re.fullmatch(r"\w+", no)):
            raise ValueError(f"judge.labels are {', '.join(map(repr, labels))}: two different words, met and not met")
        self.labels = None if self._together else labels  # a preference model compares their probabilities
        self._words, self._worth = {"yes": labels[0], "no": labels[1]}, {yes: 1.0, no: 0.0}
        self._line = re.compile(rf"^[^\w\n]*([0-9]+)[^\w\n]+({yes}|{no})\b", re.MULTILINE)
        self._criteria = None if criteria is None else read_criteria(criteria, "judge.criteria")

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise BadRow for a row without a rubric that can be judged."""
        self._read(row)

    def ask(self, group: Sequence[Sample]) -> list[Messages]:
        """Raises BadRow as `check_row` does."""
        criteria = self._read(group[0].meta)
        numbered = "\n".join(f"{number}. {one.text}" for number, one in enumerate(criteria, 1))
        fields = [{"criteria": numbered}] if self._together else [{"criterion": one.text} for one in criteria]
        return [
            user_message(self.template.format(prompt=prompt_text(sample), response=shown, **self._words, **field))
            for sample in group
            for shown, _ in [show_response(sample, self._max_characters)]
            for field in fields
        ]

    def verdict(self, answer: str, group: Sequence[Sample]) -> Verdict | None:
        """1.0 where a criterion is met, else 0.0: a number for each criterion if they are judged together."""
        if self._together:
            verdicts = {int(number): self._worth[word] for number, word in self._line.findall(answer.lower())}
            numbers = range(1, len(self._read(group[0].meta)) + 1)
            return [verdicts[number] for number in numbers] if verdicts.keys() == {*numbers} else None
        words = re.findall(r"\w+", answer.lower()) or [""]
        return next((self._worth[word] for word in (words[-1], words[0]) if word in self._worth), None)

    def rewards(self, group: Sequence[Sample], verdicts: Sequence[Verdict | None]) -> list[Reward]:
        """The reward of each response, the verdict on each criterion, and how many characters were left out."""
        criteria = self._read(group[0].meta)
        if not self._together:
            verdicts = [_join(verdicts[i : i + len(criteria)]) for i in range(0, len(verdicts), len(criteria))]
        return [self._weigh(sample, criteria, met) for sample, met in zip(group, verdicts, strict=True)]

    def _weigh(self, sample: Sample, criteria: Sequence[Criterion], met: Any) -> Reward:
        if met is None:
            return None
        earned = sum(one.weight * verdict for one, verdict in zip(criteria, met, strict=True))
        share = earned / sum(one.weight for one in criteria if one.weight > 0)
        _, cut = show_response(sample, self._max_characters)
        logged = {f"criterion_{number}": verdict for number, verdict in enumerate(met, 1)}
        return {"reward": min(max(share, 0.0), 1.0), **logged} | ({"cut_characters": float(cut)} if cut else {})

    def _read(self, row: Mapping[str, Any]) -> list[Criterion]:
        if self._criteria is not None:
            return self._criteria
        if row.get(self._key) is None:
            raise BadRow(f"the row has no rubric under '{self._key}' (judge.key); it has {', '.join(sorted(row))}")
        return read_criteria(row[self._key], self._key)


def _join(verdicts: Sequence[Any]) -> list[float] | None:
    return None if None in verdicts else [*verdicts]


def read_criteria(value: Any, name: str) -> list[Criterion]:
    """Read texts or {criterion, weight}. BadRow says by ``name`` what is wrong with them."""
    if not isinstance(value, list) or not value:
        raise BadRow(f"{name} is {value!r:.80}; a rubric is a list of texts or of {{criterion, weight}}")
    criteria = [_read_criterion(entry, f"{name}[{index}]") for index, entry in enumerate(value)]
    if not any(one.weight > 0 for one in criteria):
        raise BadRow(f"{name} has no weight above 0, so that no response can earn anything")
    return criteria


def _read_criterion(value: Any, name: str) -> Criterion:
    entry = {"criterion": value} if isinstance(value, str) else value
    if not isinstance(entry, dict):
        raise BadRow(f"{name} is {value!r:.80}; a criterion is a text or {{criterion, weight}}")
    if unknown := sorted(map(str, entry.keys() - {"criterion", "weight"})):
        raise BadRow(f"{name} has the key '{unknown[0]}'; a criterion has `criterion` and `weight`")
    text, weight = entry.get("criterion"), entry.get("weight")
    if not isinstance(text, str) or not text.strip():
        raise BadRow(f"{name}: the criterion is {text!r:.80}, no text")
    if weight is not None and not is_number(weight):
        raise BadRow(f"{name}: the weight is {weight!r:.80}, no finite number")
    return Criterion(text.strip(), 1.0 if weight is None else float(weight))


def show_response(sample: Sample, max_characters: int) -> tuple[str, int]:
    """The response as a judge reads it, and how many characters at its beginning are left out.

    Of an episode with several messages after the prompt it is the conversation, as "role: text" paragraphs.
    """
    prompt = sample.meta.get("messages") or [{"role": "user", "content": sample.prompt}]
    follows = sample.messages[: len(prompt)] == prompt
    messages = sample.messages[len(prompt) :] if follows else sample.messages
    text = "\n\n".join(map(_show_message, write_markers(messages))) if len(messages) > 1 else sample.response
    cut = max(0, len(text) - max_characters)
    return (f"[the first {cut} characters are left out]\n{text[cut:]}" if cut else text), cut


def _show_message(message: Mapping[str, Any]) -> str:
    functions = [call.get("function", call) for call in message.get("tool_calls") or ()]
    calls = [f"[calls {one.get('name')} {json.dumps(one.get('arguments'), ensure_ascii=False)}]" for one in functions]
    return "\n".join([f"{message['role']}: {message['content']}", *calls])
