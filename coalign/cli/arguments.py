"""Arguments that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[Path, typer.Argument(help="The run's YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Settings over those of the file, e.g. `models.trainer.optimizer.lr=1e-6 runtime.steps=50`."),
]


def load_run(path: Path, overrides: list[str] | None):
    """The run that a YAML file describes."""
    from coalign.config import load
    from coalign.runtime.build import recipe

    return load(path, overrides or [], defaults=lambda algorithm: recipe(algorithm).defaults)
