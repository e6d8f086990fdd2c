"""Responses to compare: pairs of a chosen and a rejected one, or several with ranks or scores."""

from __future__ import annotations

import math
from typing import Any

from coalign.data.examples import Example
from coalign.data.responses import Responses
from coalign.data.sources import BadRow


class PreferenceSource(Responses):
    """Rows as groups of sequences, one for each response to the prompt.

    Sequence columns: ``preference``, higher is better within the row (a pair: 1 and 0; several responses: their scores,
    or 0, -1, -2 … in the order given, best first); ``margin``, how much better the chosen one is where the row says so
    and 0.0 elsewhere; ``index`` (chosen before rejected); ``prompt_length``, of the prompt that they share.

    A pair stands under ``data.chosen_key`` and ``rejected_key``: texts, assistant messages, lists of messages that
    follow the prompt, or whole conversations that begin alike. Several responses stand under ``responses_key``, with
    ``scores_key`` where they have scores.
    """

    def encode(self, row: dict[str, Any]) -> list[Example]:
        said, columns = self._ranked(row) if self.reader.has(row, self.config.responses_key) else self._pair(row)
        prompt, responses = self.reader.compared(row, said)
        examples = self.sequences(row, prompt, responses, columns)
        if all(example.tokens == examples[0].tokens for example in examples):
            raise BadRow(f"{', '.join(said)} are identical", "identical")
        return examples

    def _pair(self, row: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, float]]]:
        said = {key: self.reader.value(row, key) for key in (self.config.chosen_key, self.config.rejected_key)}
        return said, [{"preference": 1.0, "margin": self._margin(row)}, {"preference": 0.0, "margin": 0.0}]

    def _margin(self, row: dict[str, Any]) -> float:
        key = self.config.margin_key
        if not self.reader.has(row, key):
            return 0.0
        if not (_is_number(row[key]) and row[key] >= 0):
            raise BadRow(f"'{key}' is {row[key]!r}; expected how much better the chosen response is, a number from 0")
        return float(row[key])

    def _ranked(self, row: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, float]]]:
        key = self.config.responses_key
        responses = row[key]
        if not isinstance(responses, list) or len(responses) < 2:
            raise BadRow(f"'{key}' is {str(responses)[:80]!r}; expected a list of two responses or more")
        scores = self._scores(row, len(responses))
        if len(set(scores)) == 1:
            raise BadRow(f"'{self.config.scores_key}' are all {scores[0]}", "identical")
        said = {f"{key}[{i}]": response for i, response in enumerate(responses)}
        return said, [{"preference": score, "margin": 0.0} for score in scores]

    def _scores(self, row: dict[str, Any], count: int) -> list[float]:
        key = self.config.scores_key
        if not self.reader.has(row, key):
            return [-float(rank) for rank in range(count)]
        scores = row[key]
        if not isinstance(scores, list) or len(scores) != count or not all(map(_is_number, scores)):
            raise BadRow(f"'{key}' is {str(scores)[:80]}; expected {count} numbers, one for each response")
        return [float(score) for score in scores]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
