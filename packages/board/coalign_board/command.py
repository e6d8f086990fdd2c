"""The commands that show runs: in a browser, and in a terminal."""

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
    from coalign_board.server import serve_board

    serve_board(runs, host, port, token_file)


def watch(run: Annotated[Path, typer.Argument(help="The folder of a run, going or ended.")]):
    """Show a run in this terminal, and follow it: curves, metrics, samples, log. `q` quits; the run goes on."""
    try:
        from coalign_board.watch import watch_run
    except ModuleNotFoundError as missing:
        raise ImportError(f"`coalign watch` needs {missing.name}: pip install 'coalign-board[watch]'") from missing

    watch_run(run)
