"""The usable rows of one source: what prompts and conversations have in common.

Every row is read, rendered and tokenised once when the source opens (thousands of rows a second), so what will be
dropped is known before the first step; only row numbers are kept, and a row is tokenised again when it is drawn.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from coalign.config.schema import DataConfig, SourceConfig
from coalign.data.batch import Batch
from coalign.data.messages import RowReader
from coalign.data.sources import BadRow, Rows
from coalign.data.templates import Template
from coalign.types import SEQUENCE_COLUMNS, TOKEN_COLUMNS


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence as the trainer sees it; ``loss_mask`` is None for a prompt.

    ``row`` is the data set's row. ``columns`` holds further columns of the batch: a number is one of the sequence, a
    list one per token (of length T, or T rows).
    """

    tokens: list[int]
    row: dict[str, Any]
    loss_mask: list[bool] | None = None
    columns: dict[str, Any] = field(default_factory=dict)

    def cut_left(self, length: int, bos: int | None) -> Example:
        """The last ``length`` tokens; a BOS stays in front."""
        first = int(self.tokens[0] == bos)
        rest = len(self.tokens) - length + first
        cut = lambda column: column[:first] + column[rest:] if isinstance(column, list) else column  # noqa: E731
        return replace(
            self,
            tokens=cut(self.tokens),
            loss_mask=cut(self.loss_mask),
            columns={name: cut(column) for name, column in self.columns.items()},
        )


class Examples(ABC):
    """The rows that can be used, in order: ``len(examples)``, ``examples[i]``, both without the dropped ones.

    The policies ``on_missing_key``, ``on_empty`` and ``on_long`` say what happens to the others: dropped and counted
    (see ``report``), or refused with a ValueError that says where the row is and what is wrong with it. A row that is
    broken in another way is always refused.
    """

    longest: ClassVar[str]  # the key of DataConfig that bounds a row, in tokens

    def __init__(
        self,
        name: str,
        rows: Rows,
        config: DataConfig,
        source: SourceConfig,
        template: Template,
        limit: int | None = None,
    ) -> None:
        """``limit`` stops after that many usable rows."""
        self.name = name
        self.reader = RowReader.of(config, source)
        self.max_tokens: int | None = getattr(config, self.longest)
        self.template = template
        self._rows = rows
        self._policy = {"missing": config.on_missing_key, "empty": config.on_empty, "long": config.on_long}
        self._used = array("q")
        self._counts: Counter[str] = Counter()
        self._hash = self._scan(limit)

    @abstractmethod
    def encode(self, row: dict[str, Any]) -> list[Example]:
        """The sequences of a row, of whatever length: one, or several that are drawn together as one group (responses
        to compare). BadRow where that cannot be."""

    def __len__(self) -> int:
        return len(self._used)

    def __getitem__(self, index: int) -> list[Example]:
        number = self._used[index]
        examples = self.fit(self.encode(self._rows[number]))
        for example in examples:
            example.row.update(_source=self.name, _row=number)
        return examples

    def report(self) -> str:
        """What became of the rows: "7473 rows: 7470 used, 2 empty, 1 over 1024 tokens"."""
        words = {
            "missing": "without the key",
            "empty": "empty",
            "long": f"over {self.max_tokens} tokens",
            "cut": f"of these cut to {self.max_tokens} tokens",
        }
        counted = [f"{self._counts[reason]} {text}" for reason, text in words.items() if self._counts[reason]]
        return f"{self._counts['rows']} rows: " + ", ".join([f"{len(self)} used", *counted])

    def fingerprint(self) -> dict[str, Any]:
        """The number of usable rows, and a hash of their contents and tokens."""
        return {"name": self.name, "rows": len(self), "hash": self._hash}

    def fit(self, examples: list[Example]) -> list[Example]:
        """The examples within ``max_tokens``, each with something to learn unless it is a prompt."""
        return [self._fit(example) for example in examples]

    def _fit(self, example: Example) -> Example:
        length = len(example.tokens)
        if self.max_tokens is not None and length > self.max_tokens:
            if self._policy["long"] != "truncate_left":
                raise BadRow(f"{length} tokens; at most {self.max_tokens} are allowed", "long")
            example = example.cut_left(self.max_tokens, self.template.tokenizer.bos_token_id)
        if example.loss_mask is None:
            return example
        mask = [False, *example.loss_mask[1:]]  # nothing precedes the first token, so nothing can predict it
        if not any(mask):
            raise BadRow("no token of the assistant to learn", "empty")
        return replace(example, loss_mask=mask)

    def _scan(self, limit: int | None) -> str:
        seen = hashlib.blake2b(digest_size=16)
        for number in range(len(self._rows)):
            if len(self._used) == limit:
                break
            self._counts["rows"] += 1
            try:
                whole = self.encode(self._rows[number])
                examples = self.fit(whole)
            except BadRow as error:
                if self._policy.get(error.reason, "error") == "error":
                    raise ValueError(f"{self._rows.where(number)}: {error}") from error
                self._counts[error.reason] += 1
                continue
            self._counts["cut"] += any(len(e.tokens) < len(w.tokens) for e, w in zip(examples, whole, strict=True))
            self._used.append(number)
            for example in examples:
                seen.update(array("i", example.tokens).tobytes())
                row = json.dumps(example.row, sort_keys=True, default=lambda value: type(value).__name__)
                seen.update(row.encode())
        return seen.hexdigest()


def to_batch(drawn: Sequence[Sequence[Example]], groups: Sequence[int]) -> Batch:
    """Rows of one kind as a Batch; the sequences of a row share its number in ``groups``.

    Columns: tokens, group, rows; loss_mask, if the examples have one, and with it prompt_length (the tokens before the
    first trained one); index, where a row has several sequences; and the examples' own.
    """
    examples = [example for row in drawn for example in row]
    token: dict[str, Any] = {"tokens": [t for e in examples for t in e.tokens]}
    sequence: dict[str, Any] = {"group": [g for g, row in zip(groups, drawn, strict=True) for _ in row]}
    if examples and examples[0].loss_mask is not None:
        token["loss_mask"] = [m for e in examples for m in e.loss_mask or []]
        sequence["prompt_length"] = [(e.loss_mask or []).index(True) for e in examples]
    if len(examples) > len(drawn):
        sequence["index"] = [i for row in drawn for i in range(len(row))]
    for name, column in examples[0].columns.items() if examples else ():
        values = [e.columns[name] for e in examples]
        if isinstance(column, list):
            token[name] = [v for value in values for v in value]
        else:
            sequence[name] = values
    return Batch(
        torch.tensor([len(e.tokens) for e in examples], dtype=torch.int64),
        {name: torch.tensor(column, dtype=TOKEN_COLUMNS.get(name)) for name, column in token.items()},
        {name: torch.tensor(column, dtype=SEQUENCE_COLUMNS.get(name)) for name, column in sequence.items()}
        | {"rows": [e.row for e in examples]},
    )
