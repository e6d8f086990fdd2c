"""Single responses, each desirable or not (Kahneman-Tversky optimisation)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from coalign.data.examples import Example
from coalign.data.responses import Responses
from coalign.data.sources import BadRow


class LabelledSource(Responses):
    """Rows as one sequence, or as two where they hold a pair.

    Sequence columns: ``preference``, 1.0 for a desirable response and 0.0 for another; ``index``; ``prompt_length``.
    A row has a prompt, a response (under ``data.answer_key``, or the end of its messages) and a ``label_key``; or a
    chosen and a rejected response, which are a desirable and an undesirable one.
    """

    counted = {"desirable": "desirable", "undesirable": "undesirable"}

    def encode(self, row: dict[str, Any]) -> list[Example]:
        config = self.config
        if self.reader.has(row, config.chosen_key):
            said = {key: self.reader.value(row, key) for key in (config.chosen_key, config.rejected_key)}
            prompt, responses = self.reader.compared(row, said)
            examples = self.sequences(row, prompt, responses, [{"preference": 1.0}, {"preference": 0.0}])
            if examples[0].tokens == examples[1].tokens:
                raise BadRow(f"{', '.join(said)} are identical", "identical")
            return examples
        label = self._label(row)
        prompt, response = self.reader.answered(row)
        return self.sequences(row, prompt, [response], [{"preference": label}])

    def count(self, examples: list[Example]) -> Mapping[str, int]:
        return Counter("desirable" if example.columns["preference"] else "undesirable" for example in examples)

    def concern(self) -> str:
        absent = [label for label in self.counted if not self.counts[label]]
        return f"none of the {self.counts['used']} usable rows is {' or '.join(absent)}" if absent else ""

    def _label(self, row: dict[str, Any]) -> float:
        value = self.reader.value(row, self.config.label_key)
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise BadRow(f"'{self.config.label_key}' is {value!r}; expected true or false, or 1 or 0")
        return float(value)
