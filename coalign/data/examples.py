"""The base encoder that turns a row into token sequences, and the packing of sequences into a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch

from coalign.config.schema import DataConfig, SourceConfig
from coalign.data.batch import Batch
from coalign.data.images.placeholders import REASON as IMAGE
from coalign.data.images.placeholders import describe_placeholders
from coalign.data.messages import Message
from coalign.data.reader import RowReader
from coalign.data.sources import BadRow, SourceRow
from coalign.data.templates import Template, get_bos, locate_images
from coalign.types import ENVIRONMENT_KEY, SEQUENCE_COLUMNS, SOURCE_KEY, TOKEN_COLUMNS, ImageSpan

KEEPS_SPECIAL_TOKENS = "_keep_special_tokens"
# Keys added to each row: the name of its source, and its number there. The third is added only for a source that may
# write special tokens, and removed from other rows.
MARKS = ("_source", "_row", KEEPS_SPECIAL_TOKENS)


@dataclass(frozen=True, order=True)
class RowLimit:
    """The longest row that a model can read at once; ``key`` names the setting that limits it.

    ``scope``: tokens of one sequence, tokens of all sequences of a row (which a loss compares), or patches of its
    images.
    """

    amount: int
    key: str
    scope: Literal["sequence", "row", "patches"] = "sequence"

    @property
    def origin(self) -> str:
        """The key in brackets, for a message; empty for a limit of `data`, which other messages name."""
        return "" if self.key.startswith("data.") else f" ({self.key})"

    def describe_excess(self, amount: int, images: str = "") -> str:
        """Say that a sequence of ``amount`` tokens is too long; ``images``: how many of them stand for images."""
        if not self.origin:
            return f"{amount} tokens{images}; at most {self.amount} are allowed"
        return f"a sequence of it has {amount} tokens{images}, and {self.amount} are what is read at once{self.origin}"

    @staticmethod
    def choose(setting: int | None, key: str, limits: Sequence[RowLimit]) -> dict[str, RowLimit]:
        """Choose the lowest limit of each scope; ``setting`` is that of `data`, under ``key``."""
        named = [*limits, *([] if setting is None else [RowLimit(setting, key)])]
        return {scope: min(limit for limit in named if limit.scope == scope) for scope in {one.scope for one in named}}

    def __str__(self) -> str:
        words = {"sequence": "tokens", "row": "tokens in all responses together", "patches": "patches of images"}
        return f"{self.amount} {words[self.scope]}{self.origin}"


@dataclass(frozen=True, slots=True)
class Example:
    """One token sequence; ``loss_mask`` is None for a prompt.

    ``row`` is the data set's row. ``columns`` holds further columns of the batch: a number is a sequence column, a list
    of length T a token column. All examples of a kind have the same columns. ``images`` are spans of tokens; None in a
    run that reads text alone.
    """

    tokens: list[int]
    row: dict[str, Any]
    loss_mask: list[bool] | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    images: tuple[ImageSpan, ...] | None = None

    def cut_left(self, drop: int, bos: int | None) -> Example:
        """Remove ``drop`` tokens from the beginning, after a BOS, and lower ``prompt_length`` by as many.

        BadRow (long) if an image would be cut in two.
        """
        first = int(self.tokens[0] == bos)

        def cut(column: list[Any]) -> list[Any]:
            return column[:first] + column[first + drop :]

        columns = {name: cut(value) if isinstance(value, list) else value for name, value in self.columns.items()}
        if "prompt_length" in columns:
            columns["prompt_length"] = self.columns["prompt_length"] - drop
        mask = None if self.loss_mask is None else cut(self.loss_mask)
        images = self.images and _cut_images(self.images, first, drop)
        return replace(self, tokens=cut(self.tokens), loss_mask=mask, columns=columns, images=images)


def _cut_images(images: tuple[ImageSpan, ...], first: int, drop: int) -> tuple[ImageSpan, ...]:
    kept = tuple(span for span in images if span.start >= first + drop)
    gone = {id(span): span for span in images if span not in kept}.values()
    # An image may have several spans: it goes as a whole, or not at all.
    if any(span.stop > first + drop for span in gone) or any(
        span.first and (index == 0 or kept[index - 1].image != span.image) for index, span in enumerate(kept)
    ):
        raise BadRow(f"to cut {drop} tokens on the left would cut an image in two", "long")
    return tuple(replace(span, start=span.start - drop) for span in kept)


class RowEncoder(ABC):
    """Encodes the rows of one source, and drops, counts or refuses unusable ones.

    The policies ``bad_rows`` (a missing key, images), ``on_empty``, ``on_identical`` and ``on_long`` decide whether
    such a row is dropped and counted (see ``report``), or refused with a ValueError that names its line and its fault.
    Rows with other faults are always refused. ``limits`` are those of the run's models, beside the limit that `data`
    sets.
    """

    keys: ClassVar[str]  # the keys that a row needs, in words
    longest: ClassVar[str]  # the key of DataConfig that limits the tokens of a row
    from_tokens: ClassVar[bool] = False  # whether an indexed dataset can replace rows of text
    reads_images: ClassVar[bool] = True  # whether rows may hold images
    counted: ClassVar[Mapping[str, str]] = {}  # further counts of used rows: {name in `count`: words for the report}

    def __init__(
        self, name: str, config: DataConfig, source: SourceConfig, template: Template, limits: Sequence[RowLimit] = ()
    ) -> None:
        self.name = name
        self.source, self.environment = source.called, source.environment
        self.config = config
        self.reader = RowReader(config, source, template.placeholders and template.placeholders.open_rows())
        self.limits = RowLimit.choose(getattr(config, self.longest), f"data.{self.longest}", limits)
        self.max_tokens = self.limits["sequence"].amount if "sequence" in self.limits else None
        self.first_long = ""  # location and problem of the first row that is too long for a model of the run
        self.template = template
        self.counts: Counter[str] = Counter()
        self.policy = {
            "missing": config.bad_rows,
            "empty": config.on_empty,
            "identical": config.on_identical,
            "long": config.on_long,
            IMAGE: config.bad_rows,
        }

    @abstractmethod
    def encode(self, row: dict[str, Any]) -> list[Example]:
        """Encode a row as one or more sequences of any length; several form one group (responses to compare).

        BadRow if the row is unusable.
        """

    def read(self, row: dict[str, Any], number: int) -> list[Example]:
        """Encode row ``number`` within ``max_tokens`` and mark its origin. BadRow if the row is unusable."""
        try:
            return self.mark_origin(self._fit_all(self.encode(self.reader.add_names(row))), number)
        except BadRow as error:  # its images may be others than when all rows were read
            raise BadRow(f"{self.name} row {number}: {error}", error.reason) from error

    def locate_images(self, tokens: list[int], messages: Sequence[Message]) -> tuple[ImageSpan, ...] | None:
        """Find where the images of ``messages`` stand in their tokens; None in a run that reads text alone."""
        return None if self.template.placeholders is None else locate_images(self.template, tokens, messages)

    def use(self, entry: SourceRow) -> list[Example] | None:
        """Encode and count a new row: None if it is dropped, ValueError if it is refused."""
        self.counts["rows"] += 1
        markers = self.template.guard.codes_read
        try:
            encoded = self.encode(self.reader.add_names(entry.row()))
            examples = self._fit_all(encoded)
        except BadRow as error:
            if self.policy.get(error.reason, "error") == "error":
                raise ValueError(f"{entry.where()}: {error}{self._describe_mixture(error)}") from error
            self.counts[error.reason] += 1
            if error.origin and not self.first_long:
                self.first_long = f"{entry.where()}: {error}"
            return None
        self.counts["used"] += 1
        self.counts["markers"] += self.template.guard.codes_read > markers
        self.counts.update(self.count(examples))
        self.counts["cut"] += any(len(e.tokens) < len(w.tokens) for e, w in zip(examples, encoded, strict=True))
        self.mark_origin(examples, entry.number)
        self.counts[f"{SOURCE_KEY}={examples[0].row[SOURCE_KEY]}"] += 1
        return examples

    def count_by_source(self) -> dict[str, int]:
        """Count the rows used so far, by the name of their source."""
        prefix = f"{SOURCE_KEY}="
        return {key.removeprefix(prefix): n for key, n in self.counts.items() if key.startswith(prefix)}

    def _describe_mixture(self, error: BadRow) -> str:
        if error.reason != "missing" or not self.counts["used"]:
            return ""
        return (
            f". {self.counts['used']} rows of {self.name} have it, so its rows are of different forms: split them into "
            "sources with `keys` of their own, or leave such rows out (`data.bad_rows: drop`)"
        )

    @property
    def limit(self) -> str:
        """The maximum length of a row, in words."""
        return " or ".join(str(self.limits[scope]) for scope in ("sequence", "row", "patches") if scope in self.limits)

    def describe_emptiness(self, report: str) -> str:
        """Explain why no row is usable: the report, the key to change, and the first row that is too long."""
        if not self.counts["long"]:
            return f"({report})"
        setting = getattr(self.config, self.longest)
        if not self.first_long:
            return f"({report}); data.{self.longest} is the bound"
        return f"({report}); data.{self.longest} is {setting or 'not set'}; the first: {self.first_long}"

    def describe_left_out(self) -> str:
        """Name the first row that is too long for a model of the run; empty if there is none."""
        return f"rows that are too long for a model are left out; the first: {self.first_long}" * bool(self.first_long)

    def count(self, examples: list[Example]) -> Mapping[str, int]:
        """Compute the counts that ``counted`` names for the examples of a used row."""
        return {}

    def warning(self) -> str:
        """A warning for the user after all rows have been read; empty if there is none."""
        return self.describe_left_out()

    def report(self) -> str:
        """Summarise how many rows are used and dropped: "7470 used, 2 empty, 1 over 1024 tokens"."""
        words = {
            "missing": "without the key",
            "empty": "empty",
            "identical": "with nothing to choose between",
            "long": f"over {self.limit}",
            IMAGE: "with images that cannot be used",
            "cut": f"of these cut to {self.limit}",
            "markers": "of these with a special token's text, read as text (see keep_special_tokens)",
            **self.counted,
        }
        dropped = [f"{self.counts[reason]} {text}" for reason, text in words.items() if self.counts[reason]]
        return ", ".join([f"{self.counts['used']} used", *dropped])

    def _fit_all(self, examples: list[Example]) -> list[Example]:
        """Bring a row within all limits. BadRow (long) if that is not allowed."""
        fitted = self.fit(examples)
        patches = {span.image: span.patches for example in fitted for span in example.images or ()}
        if (limit := self.limits.get("patches")) and (count := sum(patches.values())) > limit.amount:
            raise BadRow(f"images of {count} patches, and {limit} are what is read at once", "long", limit.origin)
        return fitted

    def fit(self, examples: list[Example]) -> list[Example]:
        """Bring examples within ``max_tokens``. BadRow if that is not allowed, or if nothing trained would be left."""
        return [exclude_first_token(self.truncate(example)) for example in examples]

    def mark_origin(self, examples: list[Example], number: int) -> list[Example]:
        for example in examples:
            example.row.pop(KEEPS_SPECIAL_TOKENS, None)
            marks = (self.name, number, True) if self.template.guard.keep else (self.name, number)
            example.row.update(zip(MARKS, marks, strict=False))
            named = example.row.get(SOURCE_KEY)
            example.row[SOURCE_KEY] = self.source if named is None else str(named)
            if self.environment is not None:
                example.row.setdefault(ENVIRONMENT_KEY, self.environment)
        return examples

    def truncate(self, example: Example) -> Example:
        """Cut a long example on the left if `on_long` says so. BadRow (long) otherwise."""
        length = len(example.tokens)
        if self.max_tokens is None or length <= self.max_tokens:
            return example
        if self.policy["long"] != "truncate_left":
            limit, images = self.limits["sequence"], describe_placeholders(example.images or ())
            raise BadRow(limit.describe_excess(length, images), "long", limit.origin)
        return example.cut_left(length - self.max_tokens, get_bos(self.template.tokenizer))


def exclude_first_token(example: Example) -> Example:
    """Take the first token out of the loss mask: no token precedes it, so none can predict it.

    BadRow (empty) if no trained token is left. Prompts, which have no mask, stay as they are.
    """
    if example.loss_mask is None:
        return example
    mask = [False, *example.loss_mask[1:]]
    if not any(mask):
        raise BadRow("no token of the assistant to learn", "empty")
    return replace(example, loss_mask=mask)


def build_batch(drawn: Sequence[Sequence[Example]], groups: Sequence[int]) -> Batch:
    """Pack rows of one kind into a Batch; all sequences of a row get its number in ``groups``.

    Columns: tokens, group, rows, and the examples' own. If the examples have a loss mask: loss_mask and prompt_length
    (the tokens before the first trained one, unless the examples give it themselves).
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
        | {"rows": [e.row for e in examples]}
        | ({"images": [e.images for e in examples]} if examples and examples[0].images is not None else {}),
    )
