"""Commands on the weights of models: make a directory from another one, compare two."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def extend_vocab(
    model: Annotated[Path, typer.Argument(help="A Hugging Face model directory.")],
    tokens: Annotated[
        Path,
        typer.Option(
            help="New tokens: a text file of one token a line (they become added tokens, found wherever they stand), "
            "or a `tokenizer.json` or SentencePiece `.model` (its pieces are merged into the tokenizer's BPE)."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory to write; must not exist or be empty.")],
    special: Annotated[bool, typer.Option(help="Leave the tokens of a list out of decoded texts.")] = False,
    pad_to_multiple: Annotated[
        int, typer.Option(min=1, help="Rows are padded to a multiple of this, if the model's spare ones do not do.")
    ] = 64,
    eos: Annotated[str | None, typer.Option(help="Token that becomes the end-of-sequence token.")] = None,
    pad: Annotated[str | None, typer.Option(help="Token that becomes the padding token.")] = None,
    sample: Annotated[Path | None, typer.Option(help="A text to count tokens of, before and after.")] = None,
):
    """Add tokens to a tokenizer and a model; a new row is the mean of the rows of the token's old pieces."""
    from coalign.runtime.display import Display
    from coalign.vocab import extend

    roles = {role: token for role, token in {"eos": eos, "pad": pad}.items() if token is not None}
    report = extend(model, tokens, output, special=special, pad_to_multiple=pad_to_multiple, roles=roles, sample=sample)
    display = Display()
    display.table(f"{model} -> {output}", report.table())
    for why, what in report.tokens.skipped.items():
        if what:
            display.note(f"skipped, {why}: {', '.join(map(repr, what[:8]))}{', ...' if len(what) > 8 else ''}")


def merge(
    base: Annotated[Path, typer.Argument(help="A Hugging Face model directory.")],
    adapter: Annotated[Path, typer.Argument(help="A LoRA adapter of that model, in peft's format.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory to write; must not exist or be empty.")],
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16; default: the base's.")] = None,
):
    """Merge an adapter into its base model: one directory that loads without peft."""
    from coalign.modules.merge import merge as write
    from coalign.runtime.display import Display

    write(base, adapter, output, dtype=dtype)
    Display().note(f"{base} + {adapter} -> {output}")


def check_sync(
    sides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Two directories with weights (Hugging Face, a checkpoint, a run folder); with --config, settings "
            "over those of the file."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A run's YAML: start its models, sync, compare what they hold and compute.")
    ] = None,
):
    """Compare the weights of two sides, tensor by tensor. Exit code 1 if they differ."""
    from coalign.api import load_config
    from coalign.runtime.display import Display
    from coalign.runtime.sync_check import check_run, check_saved

    if config is not None:
        same = check_run(load_config(config, sides), Display())
    elif sides is not None and len(sides) == 2:
        same = check_saved(Path(sides[0]), Path(sides[1]), Display())
    else:
        raise typer.BadParameter("give two directories, or --config and a run's YAML")
    raise typer.Exit(0 if same else 1)
