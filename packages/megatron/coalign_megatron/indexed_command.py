"""Commands on indexed datasets: tokenised documents in Megatron's format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from coalign.processes.host import count_processors

app = typer.Typer(
    help="Tokenised documents in Megatron's format (PREFIX.bin and PREFIX.idx).",
    no_args_is_help=True,
    add_completion=False,
)
Prefix = Annotated[Path, typer.Option("--output", "-o", help="Prefix to write; .bin and .idx are added to it.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output if it exists.")]


@app.command()
def build(
    inputs: Annotated[list[str], typer.Argument(help="Files, patterns of them, datasets of the hub, URLs.")],
    output: Prefix,
    tokenizer: Annotated[str, typer.Option(help="A Hugging Face model directory.")],
    key: Annotated[str, typer.Option(help="A row's key with the text.")] = "text",
    missing: Annotated[
        Literal["error", "drop"], typer.Option(help="What to do with a row without that key.")
    ] = "error",
    processes: Annotated[int | None, typer.Option(min=1, help="Default: the machine's cores.")] = None,
    overwrite: Overwrite = False,
    keep_special_tokens: Annotated[
        bool, typer.Option(help="Read special tokens that a text spells as tokens, not as text.")
    ] = False,
    trust_remote_code: Annotated[bool, typer.Option(help="Run code that comes with the tokenizer.")] = False,
):
    """Tokenise documents, each with an end-of-sequence token. After an interruption the same command resumes."""
    from coalign.data.sources import open_rows
    from coalign.hub_data import pin_data
    from coalign.report.display import Display
    from coalign_megatron.indexed_build import BuildPlan
    from coalign_megatron.indexed_build import build as write

    display = Display()
    plan = BuildPlan(
        tuple(map(pin_data, inputs)),
        tokenizer,
        text_key=key,
        bad_rows=missing,
        keep_special_tokens=keep_special_tokens,
        trust_remote_code=trust_remote_code,
    )
    total = sum(len(open_rows(path)) for path in plan.inputs)
    with display.progress("tokenising", total) as advance:
        counts = write(plan, output, processes=processes or count_processors(), advance=advance, overwrite=overwrite)
    display.table(f"{output}.bin, {output}.idx", dict(counts))


@app.command()
def merge(
    prefixes: Annotated[list[Path], typer.Argument(help="Prefixes (or their .idx files), in the order to write.")],
    output: Prefix,
    overwrite: Overwrite = False,
):
    """Concatenate several datasets."""
    from coalign.report.display import Display
    from coalign_megatron.indexed import IndexedTokens
    from coalign_megatron.indexed_build import join

    datasets = [IndexedTokens(_prefix(path)) for path in prefixes]
    join(datasets, output, overwrite=overwrite)
    documents, tokens = sum(map(len, datasets)), sum(dataset.tokens for dataset in datasets)
    Display().note(f"{documents:,} documents, {tokens:,} tokens -> {output}.bin, {output}.idx")


@app.command()
def inspect(
    prefix: Annotated[Path, typer.Argument(help="Prefix, or its .idx file.")],
    tokenizer: Annotated[
        Path | None, typer.Option(help="Show documents as text, decoded with this model directory's tokenizer.")
    ] = None,
    documents: Annotated[int, typer.Option(min=0, help="How many documents to show.")] = 3,
):
    """Print the sizes of an indexed dataset, and some documents."""
    import numpy as np

    from coalign.report.display import Display
    from coalign_megatron.indexed import IndexedTokens

    display, data = Display(), IndexedTokens(_prefix(prefix))
    sizes = np.diff(data.ends)
    numbers = {"documents": len(data), "sequences": len(data.lengths), "tokens": data.tokens}
    if len(data):
        numbers |= {"tokens of a document, median": float(np.median(sizes)), "the most": int(sizes.max())}
        numbers |= {"the fewest": int(sizes.min()), "greatest token": int(data.flat.max(initial=0))}
    display.table(f"{data.prefix} ({data.dtype})", numbers)
    decode = str
    if tokenizer is not None:
        from transformers import AutoTokenizer

        decode = AutoTokenizer.from_pretrained(tokenizer).decode
    for number in range(min(documents, len(data))):
        display.show(f"document {number}, {sizes[number]} tokens: {decode(data.read(number, 0, 256).tolist())}")


def _prefix(path: Path) -> Path:
    from coalign.data.sources import find_prefix

    return find_prefix(path) or path
