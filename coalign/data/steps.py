"""Solutions whose steps are judged one by one (process reward models)."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from coalign.data.examples import Example
from coalign.data.responses import Responses
from coalign.data.sources import BadRow


class StepSource(Responses):
    """Rows as a prompt and the steps of its solution, each ended by ``data.step_separator``, then EOS.

        prompt   1 + 1 = 2 \\n   2 + 1 = 3 \\n  EOS
                            ^              ^          here the model judges: the last token of a separator
                                ^              ^      trained: the tokens after them, which those predict

    Steps and separators are tokenised apart, so every separator is the same tokens. Token columns: ``label``, how right
    a step is (0 to 1) at the trained tokens and 0.0 elsewhere; ``candidates`` [T, 2], the ids of ``data.step_tokens``
    (right, wrong). A step stands under ``data.steps_key`` and its label under ``data.labels_key``.
    """

    counted = {"steps": "steps"}

    @cached_property
    def candidates(self) -> list[int]:
        """The ids of what is said of a right and of a wrong step. ValueError for what is not one token."""
        ids = []
        for text in self.config.step_tokens:
            tokens = self._tokens(text)
            if len(tokens) != 1 or tokens[0] == self.template.tokenizer.unk_token_id:
                raise ValueError(
                    f"data.step_tokens: {text!r} must be one token of the tokenizer, not {len(tokens)} "
                    f"({self.template.tokenizer.convert_ids_to_tokens(tokens)}); name another text that is"
                )
            ids += tokens
        if ids[0] == ids[1]:
            raise ValueError(f"data.step_tokens: {self.config.step_tokens} are the same token; they must differ")
        return ids

    def encode(self, row: dict[str, Any]) -> list[Example]:
        steps, labels = self._steps(row)
        prompt = self.template.prompt(self.reader.prompt(row), self.reader.tools(row))
        separator = self._tokens(self.config.step_separator)
        tokens, judged = list(prompt), {}
        for step, label in zip(steps, labels, strict=True):
            tokens += self._tokens(step) + separator
            judged[len(tokens)] = label
        tokens.append(self.template.tokenizer.eos_token_id)
        columns = {
            "index": 0,
            "prompt_length": len(prompt),
            "label": [judged.get(t, 0.0) for t in range(len(tokens))],
            "candidates": [self.candidates] * len(tokens),
        }
        return [Example(tokens, dict(row), [t in judged for t in range(len(tokens))], columns)]

    def count(self, examples: list[Example]) -> dict[str, int]:
        return {"steps": sum(examples[0].loss_mask or [])}

    def _steps(self, row: dict[str, Any]) -> tuple[list[str], list[float]]:
        key, separator = self.config.steps_key, self.config.step_separator
        steps = self.reader.value(row, key)
        if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
            raise BadRow(f"'{key}' is {str(steps)[:80]!r}; expected a list of texts")
        steps = [step.removesuffix(separator) for step in steps]
        if not steps or not all(step.strip() for step in steps):
            raise BadRow(f"'{key}' is empty, or one of its steps is", "empty")
        return steps, self._labels(row, len(steps))

    def _labels(self, row: dict[str, Any], count: int) -> list[float]:
        key = self.config.labels_key
        labels = self.reader.value(row, key)
        if not isinstance(labels, list) or len(labels) != count:
            raise BadRow(f"'{key}' is {str(labels)[:80]}; expected {count} labels, one for each step")
        for i, label in enumerate(labels):
            if not isinstance(label, bool | int | float) or not 0 <= label <= 1:
                raise BadRow(f"'{key}': label {i} is {label!r}; expected true or false, or a probability from 0 to 1")
        return [float(label) for label in labels]

    def _tokens(self, text: str) -> list[int]:
        return self.template.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
