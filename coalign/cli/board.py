"""The command that shows runs in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def board(
    runs: Annotated[Path, typer.Argument(help="A directory with run folders below it, or one run folder.")] = Path(
        "runs"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 7070,
    host: Annotated[
        str, typer.Option(help="Another address than this machine's own needs --token-file.")
    ] = "127.0.0.1",
    token_file: Annotated[
        Path | None,
        typer.Option(help="A file with a token that visitors must know; they may then save, stop and scale runs."),
    ] = None,
):
    """Show runs in a browser, live while they train: curves, samples, comparisons, logs."""
    from coalign.board.server import serve_board

    serve_board(runs, host, port, token_file)
