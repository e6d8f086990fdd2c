"""The command that translates configurations of other frameworks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def import_config(
    source: Annotated[
        Path,
        typer.Argument(help="A YAML file, a shell script or a Python script of one of them."),
    ],
    file: Annotated[Path | None, typer.Argument(help="A new file to write; without it the YAML is printed.")] = None,
    trainer: Annotated[
        str | None,
        typer.Option(help="TRL's trainer, where the file does not say it, such as sft, dpo or grpo."),
    ] = None,
):
    """Write a run's YAML from a file of verl, OpenRLHF, slime, TRL, ChatLearn, LLaMA-Factory, ms-swift or Axolotl.

    It lists what was not translated, and starts nothing of what it reads.
    """
    from coalign.cli.train import write_new
    from coalign_migrate.import_config import import_config as translate

    write_new(translate(source, trainer), file)
