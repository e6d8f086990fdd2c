"""`coalign inspect-data`: shows rows as the trainer sees them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, count, groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from coalign.config.schema import RunConfig
from coalign.data.batch import Batch
from coalign.data.templates import decode
from coalign.engine.reward import list_reward_parts
from coalign.launch.data_load import load_split, load_tokenizer
from coalign.launch.fetch import fetch_sources
from coalign.launch.plan import find_recipe, plan_reward_models
from coalign.report.contact_sheet import link_image, write_contact_sheet
from coalign.report.display import Display

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def show_data(
    config: RunConfig, rows: int, display: Display, *, tokens: bool = False, thumbnails: Path | None = None
) -> None:
    """Show the first rows of the training data as the trainer sees them; with ``tokens`` every token, too.

    ``thumbnails``: a page to write with the same texts and small pictures of their images. ValueError for one of a run
    that reads text alone.
    """
    if thumbnails is not None and config.data.images is None:
        raise ValueError("--thumbnails shows the images of rows, and this run reads none: data.images is not set")
    config = fetch_sources(config, weights=False)
    tokenizer = load_tokenizer(config, plan_reward_models(list_reward_parts(config), config))
    data = load_split(config, find_recipe(config.algorithm).source, tokenizer, "train")
    drawn = list(islice((group for _ in count() for group in split_groups(data.next())), rows))
    display.show(data.report())  # after drawing: a stream knows only of rows that were drawn
    shown = [describe(group, tokenizer, tokens=tokens).renderables for group in drawn]
    for block in chain.from_iterable(shown):
        display.show(block)
    if thumbnails is not None:
        texts = [[block for block in blocks if isinstance(block, Text)] for blocks in shown]
        display.note(f"wrote {write_contact_sheet(texts, thumbnails, 'Rows as the trainer sees them')}")


TRAINED = "bold green"
JUDGED = "bold magenta"
SEEN = "bold cyan"


def split_groups(batch: Batch) -> Iterator[list[dict[str, Any]]]:
    """Yield the sequences of each drawn row."""
    for _, drawn in groupby(batch.rows(), key=lambda row: int(row["group"])):
        yield list(drawn)


def describe(group: Sequence[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, *, tokens: bool = False) -> Group:
    """Render the sequences of one drawn row (see `split_groups`): their origin, and their text as the model sees it.

    Trained text is green between ⟦ and ⟧, which show without colours too. Placeholders of an image are one, followed by
    the file, the number of tokens and the patches between ⟪ and ⟫. Where a process reward model scores, the
    label is shown between ⟨ and ⟩. Responses to compare follow their common prompt, each with its preference.
    ``tokens`` adds a table of all tokens: position, id, text, trained or not, label.
    """
    shared = int(group[0]["prompt_length"]) if len(group) > 1 and "preference" in group[0] else 0
    blocks: list[Any] = [_header(group)]
    if shared:
        blocks.append(_decode_with_images(group[0], range(shared), tokenizer))
    for row in group:
        if len(group) > 1 or "preference" in row:
            blocks.append(_title(row))
        blocks.append(_text(row, shared, tokenizer))
        if tokens:
            blocks.append(_table(row, tokenizer))
    return Group(*blocks)


def _header(group: Sequence[dict[str, Any]]) -> Text:
    first = group[0]
    source = f"{first['rows']['_source']} row {first['rows']['_row']}"
    count = sum(len(row["tokens"]) for row in group)
    if "loss_mask" not in first:
        return Text(f"{source}: {count} tokens (a prompt)", style="bold")
    trained = sum(int(row["loss_mask"].sum()) for row in group)
    what = "judged" if "label" in first else "trained"
    several = f" in {len(group)} sequences" if len(group) > 1 else ""
    return Text(f"{source}: {count} tokens{several}, {trained} {what}", style="bold")


def _title(row: dict[str, Any]) -> Text:
    if "preference" not in row:
        return Text(f"piece {int(row['index'])}: {len(row['tokens'])} tokens", style="bold")
    margin = f", margin {float(row['margin']):g}" if float(row.get("margin", 0.0)) else ""
    return Text(f"response {int(row['index'])}: preference {float(row['preference']):g}{margin}", style="bold")


def _text(row: dict[str, Any], start: int, tokenizer: PreTrainedTokenizerBase) -> Text:
    ids, mask = row["tokens"].tolist(), _mask(row)
    labels = row["label"].tolist() if "label" in row else None
    text = Text()
    for trained, run in groupby(range(start, len(ids)), key=mask.__getitem__):
        positions = list(run)
        piece = decode(tokenizer, [ids[t] for t in positions])
        if not trained:
            text.append(_decode_with_images(row, range(positions[0], positions[-1] + 1), tokenizer))
        elif labels is None:
            text.append(f"⟦{piece}⟧", style=TRAINED)
        else:
            text.append(f"⟨{', '.join(f'{labels[t]:g}' for t in positions)}⟩", style=JUDGED).append(piece)
    return text


def _decode_with_images(row: dict[str, Any], positions: range, tokenizer: PreTrainedTokenizerBase) -> Text:
    """The text of neighbouring tokens, with the images that stand there."""
    text, start, ids = Text(), positions.start, row["tokens"].tolist()
    for span in row.get("images") or ():
        if span.start in positions:
            what = f"⟪{span.path}: {span.length} tokens, {' x '.join(map(str, span.grid))} patches⟫"
            text.append(decode(tokenizer, ids[start : span.start + 1])).append(link_image(span.path, what, SEEN))
            start = span.stop
    return text.append(decode(tokenizer, ids[start : positions.stop]))


def _table(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Table:
    judged = "label" in row
    table = Table("position", "id", "token", "trained", *(["label"] if judged else []), box=None)
    for position, (i, trained) in enumerate(zip(row["tokens"].tolist(), _mask(row), strict=True)):
        cells = [str(position), str(i), Text(repr(tokenizer.decode([i]))), "yes" if trained else ""]
        if judged:
            cells.append(f"{float(row['label'][position]):g}" if trained else "")
        table.add_row(*cells, style=TRAINED if trained else "")
    return table


def _mask(row: dict[str, Any]) -> list[bool]:
    return row["loss_mask"].tolist() if "loss_mask" in row else [False] * len(row["tokens"])
