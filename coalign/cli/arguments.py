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
