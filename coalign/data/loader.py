"""Draws batches from one or several sources: shuffled, mixed, resumable, the same every time.

The n-th draw of a run follows from the seed and n. Batches run across the end of an epoch, so each one has exactly
``batch_size`` sequences; each source is shuffled anew whenever it has been used up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from coalign.config.schema import DataConfig
from coalign.data.batch import Batch
from coalign.data.conversations import ConversationSource
from coalign.data.examples import Example, Examples, to_batch
from coalign.data.prompts import PromptSource
from coalign.data.shuffle import permute, uniform
from coalign.data.sources import open_rows
from coalign.data.templates import load_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MIX, SHUFFLE = 0, 1  # keep the two streams of random numbers apart


class Loader:
    """Batches without end.

    ``weights`` are the relative probabilities of the sources at each draw, whatever their sizes; a source with weight 0
    is never drawn. ``group`` of a drawn sequence is the number of its draw (from 0, unique in the run).
    ``state_dict`` is a cursor of a few numbers. ``len(loader)`` is the number of batches in which as many rows are
    drawn as the sources hold together (with several sources, an epoch only on average).
    """

    def __init__(
        self, sources: Sequence[Examples], weights: Sequence[float], *, seed: int, shuffle: bool, batch_size: int
    ) -> None:
        """Raises ValueError for a source without usable rows. At least one weight must be positive."""
        for source in sources:
            if not len(source):
                raise ValueError(f"{source.name} has no usable rows ({source.report()})")
        self.sources = list(sources)
        self.batch_size = batch_size
        self._seed, self._shuffle = seed, shuffle
        *_, total = shares = list(accumulate(weights))
        self._until = [share / total for share in shares]
        self.rows = sum(len(s) for s, weight in zip(sources, weights, strict=True) if weight)
        self.drawn = 0
        self._taken = [0] * len(self.sources)

    def __len__(self) -> int:
        return self.steps(1)

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self.drawn / self.rows

    def steps(self, epochs: int) -> int:
        """Batches that ``epochs`` passes over the data need."""
        return math.ceil(epochs * self.rows / self.batch_size)

    def report(self) -> str:
        """What became of each source's rows, for the log."""
        return "; ".join(f"{source.name}: {source.report()}" for source in self.sources)

    def next(self) -> Batch:
        """The next ``batch_size`` draws."""
        groups = range(self.drawn, self.drawn + self.batch_size)
        return to_batch([self._draw() for _ in groups], groups)

    def all(self, limit: int | None = None) -> Iterator[Batch]:
        """Every usable row once, source after source in file order, at most ``limit`` rows.

        Only the last batch may be smaller. Leaves the cursor alone; ``group`` counts from 0.
        """
        places = [(source, i) for source in self.sources for i in range(len(source))][:limit]
        for start in range(0, len(places), self.batch_size):
            part = places[start : start + self.batch_size]
            yield to_batch([source[i] for source, i in part], range(start, start + len(part)))

    def state_dict(self) -> dict[str, Any]:
        """The cursor, and what the data looked like. JSON can hold it."""
        return {
            "drawn": self.drawn,
            "taken": list(self._taken),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "sources": [source.fingerprint() for source in self.sources],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken. ValueError if the data, the seed or the order are not the same."""
        now = self.state_dict()
        if len(state["sources"]) != len(now["sources"]):
            raise ValueError(
                f"the checkpoint was made with {len(state['sources'])} data sources, not {len(self.sources)}"
            )
        for old, new in zip(state["sources"], now["sources"], strict=True):
            if (old["rows"], old["hash"]) != (new["rows"], new["hash"]):
                raise ValueError(
                    f"{new['name']} is not the data that the checkpoint was made with: {old['rows']} usable rows of "
                    f"{old['name']} then, {new['rows']} now, or other content, tokenizer or template; "
                    "restore it or start a new run"
                )
        for key in ("seed", "shuffle"):
            if state[key] != now[key]:
                raise ValueError(
                    f"the checkpoint was made with {key}={state[key]}, not {now[key]}: the order would differ"
                )
        self.drawn, self._taken = state["drawn"], list(state["taken"])

    def _draw(self) -> list[Example]:
        point = uniform(self._seed, MIX, self.drawn)
        which = next(i for i, until in enumerate(self._until) if point < until)
        source = self.sources[which]
        epoch, place = divmod(self._taken[which], len(source))
        if self._shuffle:
            place = permute(place, len(source), self._seed, SHUFFLE, which, epoch)
        self.drawn += 1
        self._taken[which] += 1
        return source[place]


def build_loader(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    kind: Literal["prompts", "conversations"],
    split: Literal["train", "eval"],
    batch_size: int,
    seed: int,
    limit: int | None = None,
) -> Loader:
    """The loader of ``config.train`` or ``config.eval``; ``limit`` usable rows of each source at most.

    Raises FileNotFoundError and ValueError for what is wrong with files, rows, tokenizer or template, naming the place.
    """
    sources = config.train if split == "train" else config.eval
    if not sources:
        raise ValueError(f"data.{split} names no file")
    template = load_template(tokenizer, config.chat_template)
    make = PromptSource if kind == "prompts" else ConversationSource
    examples = [
        make(Path(s.path).name, open_rows(s.path, s.max_samples), config, s, template, limit=limit) for s in sources
    ]
    return Loader(examples, [s.weight for s in sources], seed=seed, shuffle=config.shuffle, batch_size=batch_size)
