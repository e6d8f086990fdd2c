"""What the trainer will see of a row, for people: `coalign inspect-data`."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRAINED = "bold green"


def describe(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, *, tokens: bool = False) -> Group:
    """One row of ``Batch.rows()`` as a rich renderable: where it is from, and its text as it will be seen.

    Trained text is green and stands between ⟦ and ⟧ (so it shows without colours too). ``tokens`` adds a table of every
    token: position, id, text, trained or not.
    """
    ids = row["tokens"].tolist()
    mask = row["loss_mask"].tolist() if "loss_mask" in row else [False] * len(ids)
    parts = [_header(row, mask), _text(ids, mask, tokenizer)]
    if tokens:
        parts.append(_table(ids, mask, tokenizer))
    return Group(*parts)


def _header(row: dict[str, Any], mask: list[bool]) -> Text:
    source = row["rows"]
    trained = f", {sum(mask)} trained" if "loss_mask" in row else " (a prompt)"
    return Text(f"{source['_source']} row {source['_row']}: {len(mask)} tokens{trained}", style="bold")


def _text(ids: list[int], mask: list[bool], tokenizer: PreTrainedTokenizerBase) -> Text:
    text = Text()
    for trained, run in groupby(zip(mask, ids, strict=True), key=lambda pair: pair[0]):
        piece = tokenizer.decode([i for _, i in run], clean_up_tokenization_spaces=False)
        if trained:
            text.append(f"⟦{piece}⟧", style=TRAINED)
        else:
            text.append(piece)
    return text


def _table(ids: list[int], mask: list[bool], tokenizer: PreTrainedTokenizerBase) -> Table:
    table = Table("position", "id", "token", "trained", box=None)
    for position, (i, trained) in enumerate(zip(ids, mask, strict=True)):
        style = TRAINED if trained else ""
        table.add_row(str(position), str(i), Text(repr(tokenizer.decode([i]))), "yes" if trained else "", style=style)
    return table
