"""Commands that come before a run: init, recipes, schema, inspect-data."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import get_terminal_size
from typing import Annotated

import typer

from coalign.cli.train import Config, NoCode, Overrides, write_new


def inspect_data(
    config: Config,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option("--rows", "-r", min=1, help="How many rows to show.")] = 3,
    tokens: Annotated[bool, typer.Option("--tokens", "-t", help="Also list every token with its id.")] = False,
    thumbnails: Annotated[
        Path | None, typer.Option(help="Also write the rows to this HTML page, with small pictures of their images.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the page if it exists.")] = False,
    no_code: NoCode = False,
):
    """Show rows as the trainer sees them: text after the chat template, trained parts, preferences and labels."""
    from coalign.api import load_config
    from coalign.config.functions import refuse_code
    from coalign.files import require_free_output
    from coalign.report.display import Display

    refuse_code(no_code)
    loaded = load_config(config, overrides, planned=True)
    if thumbnails is not None:
        require_free_output(thumbnails, [config, *(source.path for source in loaded.data.train)], overwrite=overwrite)
    from coalign_prepare.data_view import show_data

    show_data(loaded, rows, Display(), tokens=tokens, thumbnails=thumbnails)


def _complete_recipe(incomplete: str) -> list[str]:
    from coalign.config.functions import list_classes

    return [name for name in list_classes("coalign.recipes") if name.startswith(incomplete)]


def init(
    recipe: Annotated[
        str,
        typer.Argument(
            help="`sft`, `grpo`, … (`coalign recipes` lists them), or a dotted path to an Engine subclass.",
            autocompletion=_complete_recipe,
        ),
    ],
    file: Annotated[Path | None, typer.Argument(help="A new file to write; without it the YAML is printed.")] = None,
    full: Annotated[bool, typer.Option("--full", help="All settings, with their meanings and defaults.")] = False,
):
    """Write a YAML to begin a run with: what is needed, marked by angle brackets, and what most people set."""
    from coalign_prepare.run_template import RunTemplate

    write_new(RunTemplate(recipe).write(full=full), file)


def recipes():
    """List the recipes: what each is, the rows of data that it takes, and its models."""
    from coalign_prepare.run_template import describe_recipes

    for line in describe_recipes(min(100, get_terminal_size().columns)):
        typer.echo(line)


def schema(no_code: NoCode = False):
    """Print the JSON Schema of the YAML, for editors."""
    from coalign.config.functions import refuse_code
    from coalign_prepare.json_schema import build_json_schema

    refuse_code(no_code)
    typer.echo(json.dumps(build_json_schema(), indent=1))
