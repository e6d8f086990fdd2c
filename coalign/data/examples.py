"""What a row of a data set becomes: the sequences that the trainer sees. What all kinds of rows have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from coalign.config.schema import DataConfig, SourceConfig
from coalign.data.batch import Batch
from coalign.data.reader import RowReader
from coalign.data.sources import BadRow, SourceRow
from coalign.data.templates import Template
from coalign.types import SEQUENCE_COLUMNS, TOKEN_COLUMNS

MARKS = ("_source", "_row")  # keys of a row that say where it is from: the source's name, the row's number


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence as the trainer sees it; ``loss_mask`` is None for a prompt.

    ``row`` is the data set's row. ``columns`` holds further columns of the batch: a number is one of the sequence, a
    list one per token (of length T, or T rows). All examples of a kind have the same ones.
    """

    tokens: list[int]
    row: dict[str, Any]
    loss_mask: list[bool] | None = None
    columns: dict[str, Any] = field(default_factory=dict)

    def cut_left(self, drop: int, bos: int | None) -> Example:
        """Without ``drop`` tokens at the beginning; a BOS stays in front, and ``prompt_length`` goes down with them."""
        first = int(self.tokens[0] == bos)
        cut = lambda column: column[:first] + column[first + drop :] if isinstance(column, list) else column  # noqa: E731
        columns = {name: cut(column) for name, column in self.columns.items()}
        if "prompt_length" in columns:
            columns["prompt_length"] -= drop
        return replace(self, tokens=cut(self.tokens), loss_mask=cut(self.loss_mask), columns=columns)


class RowEncoder(ABC):
    """What rows of one kind become, and what happens to those that cannot be used.

    The policies ``on_missing_key``, ``on_empty``, ``on_identical`` and ``on_long`` say whether such a row is dropped
    and counted (see ``report``), or refused with a ValueError that says where it is and what is wrong with it. A row
    that is broken in another way is always refused.
    """

    longest: ClassVar[str]  # the key of DataConfig that bounds a row, in tokens
    from_tokens: ClassVar[bool] = False  # whether an indexed dataset can stand for rows
    counted: ClassVar[Mapping[str, str]] = {}  # what else is told of the used rows: {name in `count`: words}

    def __init__(self, name: str, config: DataConfig, source: SourceConfig, template: Template) -> None:
        self.name = name
        self.config = config
        self.reader = RowReader(config, source)
        self.max_tokens: int | None = getattr(config, self.longest)
        self.template = template
        self.counts: Counter[str] = Counter()
        self.policy = {
            "missing": config.on_missing_key,
            "empty": config.on_empty,
            "identical": config.on_identical,
            "long": config.on_long,
        }

    @abstractmethod
    def encode(self, row: dict[str, Any]) -> list[Example]:
        """The sequences of a row, of whatever length: one, or several that are drawn together as one group (responses
        to compare). BadRow where that cannot be."""

    def read(self, row: dict[str, Any], number: int) -> list[Example]:
        """What row ``number`` becomes, within ``max_tokens``, and marked with where it is from. BadRow likewise."""
        return self.marked(self.fit(self.encode(self.reader.named(row))), number)

    def use(self, entry: SourceRow) -> list[Example] | None:
        """Likewise of a row that nobody has seen yet: counted; None if it is dropped, ValueError if it is refused."""
        self.counts["rows"] += 1
        try:
            whole = self.encode(self.reader.named(entry.row()))
            examples = self.fit(whole)
        except BadRow as error:
            if self.policy.get(error.reason, "error") == "error":
                raise ValueError(f"{entry.where()}: {error}") from error
            self.counts[error.reason] += 1
            return None
        self.counts["used"] += 1
        self.counts.update(self.count(examples))
        self.counts["cut"] += any(len(e.tokens) < len(w.tokens) for e, w in zip(examples, whole, strict=True))
        return self.marked(examples, entry.number)

    @property
    def bound(self) -> str:
        """The greatest length of a row, in words."""
        return f"{self.max_tokens} tokens"

    def count(self, examples: list[Example]) -> Mapping[str, int]:
        """What a used row adds to the numbers of ``counted``."""
        return {}

    def concern(self) -> str:
        """What a person should be warned of once every row has been seen; empty if nothing."""
        return ""

    def report(self) -> str:
        """What became of the rows: "7470 used, 2 empty, 1 over 1024 tokens"."""
        words = {
            "missing": "without the key",
            "empty": "empty",
            "identical": "with nothing to choose between",
            "long": f"over {self.bound}",
            "cut": f"of these cut to {self.bound}",
            **self.counted,
        }
        counted = [f"{self.counts[reason]} {text}" for reason, text in words.items() if self.counts[reason]]
        return ", ".join([f"{self.counts['used']} used", *counted])

    def fit(self, examples: list[Example]) -> list[Example]:
        """The examples within ``max_tokens``, each with something to learn unless it is a prompt."""
        return [exclude_first_token(self.shortened(example)) for example in examples]

    def marked(self, examples: list[Example], number: int) -> list[Example]:
        """The examples of row ``number``, with MARKS in their rows."""
        for example in examples:
            example.row.update(zip(MARKS, (self.name, number), strict=True))
        return examples

    def shortened(self, example: Example) -> Example:
        """The example, without its beginning if that is what `on_long` says."""
        length = len(example.tokens)
        if self.max_tokens is None or length <= self.max_tokens:
            return example
        if self.policy["long"] != "truncate_left":
            raise BadRow(f"{length} tokens; at most {self.max_tokens} are allowed", "long")
        return example.cut_left(length - self.max_tokens, self.template.tokenizer.bos_token_id)


def exclude_first_token(example: Example) -> Example:
    """The example without its first token in the loss mask: nothing precedes it, so nothing can predict it.

    BadRow (empty) if nothing is left to learn; a prompt has nothing to learn anyway.
    """
    if example.loss_mask is None:
        return example
    mask = [False, *example.loss_mask[1:]]
    if not any(mask):
        raise BadRow("no token of the assistant to learn", "empty")
    return replace(example, loss_mask=mask)


def build_batch(drawn: Sequence[Sequence[Example]], groups: Sequence[int]) -> Batch:
    """Rows of one kind as a Batch; the sequences of a row share its number in ``groups``.

    Columns: tokens, group, rows; loss_mask, if the examples have one, and with it prompt_length (the tokens before the
    first trained one, unless the examples say it themselves); and the examples' own.
    """
    examples = [example for row in drawn for example in row]
    token: dict[str, Any] = {"tokens": [t for e in examples for t in e.tokens]}
    sequence: dict[str, Any] = {"group": [g for g, row in zip(groups, drawn, strict=True) for _ in row]}
    if examples and examples[0].loss_mask is not None:
        token["loss_mask"] = [m for e in examples for m in e.loss_mask or []]
        sequence["prompt_length"] = [(e.loss_mask or []).index(True) for e in examples]
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
