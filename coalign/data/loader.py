"""Draws batches from one or several sources: shuffled, mixed, resumable and reproducible.

The n-th draw of a run follows from the seed and n. Batches cross the ends of epochs; each source is shuffled anew
whenever all of its rows have been drawn.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from coalign.companions import FORMATS, load
from coalign.config.errors import ConfigError, ConfigProblem
from coalign.config.schema import DataConfig, RunConfig, SourceConfig
from coalign.data.batch import Batch
from coalign.data.examples import MARKS, Example, RowEncoder, RowLimit, build_batch
from coalign.data.kinds import KINDS
from coalign.data.order import DrawOrder, ScannedSource, ShuffledOrder, StreamedOrder, check_same_settings
from coalign.data.shuffle import DataPhase, draw_uniform
from coalign.data.sources import find_prefix, open_rows
from coalign.data.templates import load_template
from coalign.hub_data import describe_source
from coalign.types import SOURCE_KEY, Stats, Total, merge_stats

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from coalign.data.images.expansion import Placeholders
    from coalign.data.images.rows import RowImages

MIX, SHUFFLE = 0, 1  # separate the two streams of random numbers


class Loader:
    """Draws batches without end.

    ``weights`` are the relative probabilities of the sources at each draw; a source with weight 0 is never drawn. With
    ``by_share`` their shares of all draws are exact instead, to less than a row.

    A batch has ``batch_size`` rows or, with ``batch_tokens``, that many tokens on average: rows are drawn until they
    hold them, and the excess of the last row counts for the next batch. So N tokens make N / batch_tokens batches,
    whatever the lengths of the rows. A batch has at least ``min_rows`` rows.

    The column ``group`` is the number of the draw (from 0, unique in the run). ``len(loader)`` is the number of batches
    per epoch, in which as many rows are drawn as the sources have in total.
    """

    def __init__(
        self,
        orders: Sequence[DrawOrder],
        weights: Sequence[float],
        *,
        seed: int,
        batch_size: int,
        batch_tokens: int | None = None,
        min_rows: int = 1,
        allow_changed: bool = False,
        encoders: Sequence[RowEncoder] = (),
        by_share: bool = False,
    ) -> None:
        """At least one weight must be positive.

        ``allow_changed``: a checkpoint may be of other data. ``encoders`` are those of the sources, for their counts.
        """
        self.orders, self._encoders = list(orders), encoders
        self.batch_size, self.batch_tokens, self.min_rows = batch_size, batch_tokens, min_rows
        self.drawn = 0
        self._seed, self._allow_changed = seed, allow_changed
        *_, total = shares = list(accumulate(weights))
        self._until = [share / total for share in shares]
        self._shares, self.by_share = [weight / total for weight in weights], by_share
        self._counts, self._owed = [0] * len(weights), [0.0] * len(weights)  # draws by share; rows that were given back
        self._drawable = [order for order, weight in zip(orders, weights, strict=True) if weight]
        self._excess = 0  # tokens of the batches so far beyond their batch_tokens

    def __len__(self) -> int:
        return self.steps(1)

    @property
    def rows(self) -> int:
        """Rows of an epoch. ValueError for a stream."""
        return sum(_require_known(order.name, order.rows) for order in self._drawable)

    def steps(self, epochs: int) -> int:
        """Compute the number of batches of ``epochs`` passes over the data. ValueError for a stream."""
        if self.batch_tokens is None:
            return math.ceil(epochs * self.rows / self.batch_size)
        tokens = sum(_require_known(order.name, order.tokens) for order in self._drawable)
        return math.ceil(epochs * tokens / self.batch_tokens)

    def report(self) -> str:
        """Summarise how many rows of each source are used, for the log."""
        return "; ".join(f"{order.name}: {order.report()}" for order in self.orders)

    def stats(self) -> Stats:
        """Compute `data/epoch`, a mean over the sources, and `data/dropped` of streams.

        `data/markers`, if there are any, counts the rows so far in which a special token was read as text.
        """
        markers = sum(encoder.counts["markers"] for encoder in self._encoders)
        stats = merge_stats(order.stats() for order in self._drawable)
        return {**stats, "data/markers": Total(markers)} if markers else stats

    def next(self, rows: int | None = None) -> Batch:
        """Draw the next ``rows`` rows (None: a batch)."""
        first = self.drawn
        drawn = self._rows_of_a_batch() if rows is None else [self._draw() for _ in range(rows)]
        return build_batch(drawn, range(first, self.drawn))

    @property
    def is_known(self) -> bool:
        """Whether the number of rows is known: not with a stream."""
        return all(order.rows is not None for order in self.orders)

    @property
    def sources(self) -> list[str]:
        """The names of the rows' sources; with a stream, of the rows read so far."""
        return sorted(set().union(*(encoder.count_by_source() or {encoder.source} for encoder in self._encoders)))

    def count_by_source(self) -> dict[str, int]:
        """Count the usable rows that have been read, by the name of their source."""
        return sum((Counter(encoder.count_by_source()) for encoder in self._encoders), Counter())

    def all(self, limit: int | None = None) -> Iterator[tuple[str, Batch]]:
        """Yield all usable rows (at most ``limit`` of a source) in file order: (source, up to ``batch_size`` rows).

        Fewer than ``min_rows`` last rows join the batch before them. The cursor does not move; ``group`` counts from 0.
        """
        pending: dict[str, list[tuple[int, list[Example]]]] = {}
        seen: Counter[str] = Counter()
        held = self.min_rows if self.min_rows > 1 else 0
        for group, examples in enumerate(chain.from_iterable(order.once() for order in self.orders)):
            source = examples[0].row[SOURCE_KEY]
            if limit is not None and seen[source] == limit:
                continue
            seen[source] += 1
            rows = pending.setdefault(source, [])
            rows.append((group, examples))
            if len(rows) == self.batch_size + held:
                yield source, _build_numbered_batch(rows[: self.batch_size])
                del rows[: self.batch_size]
        yield from ((source, _build_numbered_batch(rows)) for source, rows in pending.items() if rows)

    def state_dict(self) -> dict[str, Any]:
        """The cursor (a few numbers) and a fingerprint of the data, as JSON values."""
        sources = [order.state_dict() for order in self.orders]
        state = {"drawn": self.drawn, "over": self._excess, "seed": self._seed, "sources": sources}
        return {**state, "counts": [*self._counts], "owed": [*self._owed]} if self.by_share else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken. ValueError if the data, the seed or the order differ."""
        if len(state["sources"]) != len(self.orders):
            raise ValueError(
                f"the checkpoint was made with {len(state['sources'])} data sources, not {len(self.orders)}"
            )
        check_same_settings(state, {"seed": self._seed})
        for order, saved in zip(self.orders, state["sources"], strict=True):
            order.load_state_dict(saved, allow_changed=self._allow_changed)
        self.drawn, self._excess = state["drawn"], state["over"]
        self._counts, self._owed = state.get("counts", self._counts), state.get("owed", self._owed)

    def give_back(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """With ``by_share``, draw from the sources of ``rows`` of data, of which nothing came, before all others.

        A source is owed no more than its share of a batch, so that one of which nothing ever comes leaves room.
        """
        names = [order.name for order in self.orders]
        for source in (names.index(row[MARKS[0]]) for row in rows if self.by_share):
            self._owed[source] = min(self._owed[source] + 1, max(1.0, self._shares[source] * self.batch_size))

    def _rows_of_a_batch(self) -> list[list[Example]]:
        if self.batch_tokens is None:
            return [self._draw() for _ in range(self.batch_size)]
        drawn, tokens = [], self._excess
        while len(drawn) < self.min_rows or tokens < self.batch_tokens:
            drawn.append(self._draw())
            tokens += sum(len(example.tokens) for example in drawn[-1])
        self._excess = tokens - self.batch_tokens
        return drawn

    def _draw(self) -> list[Example]:
        source = self._choose_source()
        self.drawn += 1
        return self.orders[source].next()

    def _choose_source(self) -> int:
        if not self.by_share:
            point = draw_uniform(self._seed, MIX, self.drawn)
            return next(i for i, until in enumerate(self._until) if point < until)
        if max(self._owed) >= 1:
            source = self._owed.index(max(self._owed))
            self._owed[source] -= 1
            return source
        total = sum(self._counts) + 1
        lacking = [round(s * total - count, 9) for s, count in zip(self._shares, self._counts, strict=True)]
        # Of several that lack as much any may be first, so that no step begins with the same source.
        source = max(range(len(lacking)), key=lambda i: (lacking[i], draw_uniform(self._seed, MIX, self.drawn, i)))
        self._counts[source] += 1
        return source


def _build_numbered_batch(rows: Sequence[tuple[int, list[Example]]]) -> Batch:
    return build_batch([examples for _, examples in rows], [group for group, _ in rows])


def build_loader(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    kind: str,
    split: Literal["train", "eval"],
    batch_size: int,
    seed: int,
    batch_tokens: int | None = None,
    min_rows: int = 1,
    allow_changed: bool = False,
    limits: Sequence[RowLimit] = (),
) -> Loader:
    """Build the loader of ``config.train`` or ``config.eval``; ``kind`` is a key of KINDS.

    ``limits``: how long a row the models of the run can read; `data.on_long` decides about longer ones.

    FileNotFoundError or ValueError, with file and line, if files, rows, tokenizer or template are faulty.
    """
    sources = config.train if split == "train" else config.eval
    if not sources:
        raise ValueError(f"data.{split} names no file")
    if split == "eval":
        config = config.model_copy(update={"stream": False, "phase": None, "phases": {}, "shuffle": False})
    encoders = [build_encoder(kind, config, source, tokenizer, limits) for source in sources]
    orders = [
        _build_order(encoder, config, source, (seed, SHUFFLE, i))
        for i, (encoder, source) in enumerate(zip(encoders, sources, strict=True))
    ]
    weights = [s.weight for s in sources]
    if config.mixing != "weight":
        sizes = [_require_known(order.name, order.rows) for order in orders]
        if config.mixing == "tokens":  # fewer draws of longer rows
            sizes = [rows / _require_known(order.name, order.tokens) for rows, order in zip(sizes, orders, strict=True)]
        weights = [weight * size for weight, size in zip(weights, sizes, strict=True)]
    return Loader(
        orders,
        weights,
        seed=seed,
        batch_size=batch_size,
        batch_tokens=batch_tokens,
        min_rows=min_rows,
        allow_changed=allow_changed,
        encoders=encoders,
        by_share=any(source.environment for source in sources),
    )


def build_encoder(
    kind: str,
    config: DataConfig,
    source: SourceConfig,
    tokenizer: PreTrainedTokenizerBase,
    limits: Sequence[RowLimit] = (),
) -> RowEncoder:
    """Build the encoder of a source's rows; ``kind`` is a key of KINDS.

    ValueError for texts of ``config`` that the rows' prompts contain, and that spell a special token, and for images
    without a processor."""
    template = load_template(
        tokenizer,
        config.chat_template,
        config.chat_template_kwargs,
        config.reasoning,
        keep_special_tokens=source.keep_special_tokens,
        placeholders=_build_placeholders(kind, config, source, tokenizer),
    )
    template.guard.check_setting(config.prompt_format, "data.prompt_format")
    template.guard.check_setting(config.system or "", "data.system")
    return KINDS[kind](describe_source(source.path), config, source, template, limits)


def _build_placeholders(
    kind: str, config: DataConfig, source: SourceConfig, tokenizer: PreTrainedTokenizerBase
) -> Placeholders | None:
    """Build the placeholders of a source's images; None for a run that reads text alone, and for documents."""
    if config.images is None or not KINDS[kind].reads_images or (images := open_row_images(config, source)) is None:
        return None
    from coalign.data.images.expansion import Placeholders
    from coalign.data.images.processor import ImageProcessor

    return Placeholders(ImageProcessor(tokenizer.name_or_path, tokenizer, config.images), images.files)


def open_row_images(config: DataConfig, source: SourceConfig) -> RowImages | None:
    """Return the reader of images in the rows of a source; None for a run that reads text alone."""
    if (images := config.images) is None:
        return None
    from coalign.data.images.image_files import ImageFiles
    from coalign.data.images.rows import RowImages

    root = Path(images.root) if images.root else Path(source.path).absolute().parent
    return RowImages(ImageFiles(root, images.max_file_pixels))


def _build_order(encoder: RowEncoder, config: DataConfig, source: SourceConfig, key: tuple[int, ...]) -> DrawOrder:
    phase = DataPhase(config.phases, config.phase) if config.phase else None
    shuffled = key if config.shuffle else None
    if prefix := find_prefix(source.path):
        if not encoder.from_tokens:
            raise ValueError(f"{source.path} holds documents as token ids; this recipe reads rows of text")
        documents = load(FORMATS, "indexed", "the reader of indexed datasets")(
            prefix,
            len(encoder.template.tokenizer),
            max_tokens=encoder.max_tokens,
            phase=phase,
            max_samples=source.max_samples,
            source=source.called,
        )
        return ShuffledOrder(documents, shuffled)
    rows = open_rows(source.path, source.max_samples, stream=config.stream)
    if config.stream:
        from coalign.data.cache import hash_file_samples, hash_settings

        identity = hash_settings(encoder, config, source, phase, hash_file_samples(rows))
        return StreamedOrder(encoder, rows, shuffled, window=config.stream_window, identity=identity, phase=phase)
    if config.cache is None:
        return ShuffledOrder(ScannedSource(encoder, rows, phase), shuffled)
    from coalign.data.cache import hash_files, hash_settings, open_cached

    # A stream's identity excludes them: longer rows are dropped when drawn, so a run may go on with other limits.
    limits = [(limit.amount, scope) for scope, limit in sorted(encoder.limits.items())]
    identity = hash_settings(encoder, config, source, phase, [hash_files(rows), limits])
    return ShuffledOrder(open_cached(Path(config.cache), encoder, rows, phase, identity), shuffled)


def _require_known(name: str, number: int | None) -> int:
    if number is None:
        raise ValueError(
            f"{name} is a stream (data.stream), so nobody knows how many rows it has: set runtime.steps or "
            "runtime.tokens, mix sources by weight (data.mixing), and precompute nothing for its rows"
        )
    return number


def check_stream(config: RunConfig) -> None:
    """Refuse a stream without an end, and shares of sources whose sizes nobody knows."""
    if not config.data.stream:
        return
    if config.runtime.steps is None and config.runtime.tokens is None:
        message = "is true, and nobody knows how many rows a stream has: set runtime.steps or runtime.tokens"
        raise ConfigError([ConfigProblem(("data", "stream"), message)])
    if config.data.mixing != "weight":
        message = f"is {config.data.mixing}, and nobody knows how many rows a stream has; use weight"
        raise ConfigError([ConfigProblem(("data", "mixing"), message)])
