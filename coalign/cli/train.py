"""Commands on a YAML file (train, check) and on a run that is going (save, stop, scale)."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coalign.companions import CHECKS, ask, load

if TYPE_CHECKING:
    from coalign.report.display import Display

Config = Annotated[Path, typer.Argument(help="The run's YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Settings that replace those of the file: `models.trainer.optimizer.lr=1e-6 runtime.steps=50`."
    ),
]


Cluster = Annotated[
    str | None,
    typer.Option(help="Place the run on this cluster, which need not be there: NODESxGPUS:NAME, `4x8:H100`."),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object: facts and problems. Exit code 1: there are problems.")
]
NoCode = Annotated[
    bool, typer.Option("--no-code", help="Run no code that the file or this directory names: for files of strangers.")
]


def train(
    config: Config,
    overrides: Overrides = None,
    quiet: Annotated[bool, typer.Option(help="Warnings and the summary only.")] = False,
):
    """Train to the last step. Ctrl-C stops after the current step with a checkpoint; the same command resumes."""
    from coalign import api

    try:
        api.train(config, overrides, quiet=quiet)
    except api.TrainingStopped as stop:
        raise typer.Exit(stop.exit_code) from stop


GoingRun = Annotated[Path, typer.Argument(help="The folder of a run that is going.")]


def scale(
    run: GoingRun, processes: Annotated[list[str], typer.Argument(help="Processes by model: `policy=4 trainer=2`.")]
):
    """Give models of a running run more processes or fewer, between two steps, and wait for the run's answer."""
    from coalign.cli.ask_run import scale_run
    from coalign.report.display import Display

    scale_run(run, processes, Display())


def save(run: GoingRun):
    """Let a running run write a checkpoint after the step under way, and wait until it is complete."""
    _ask(run, "save")


def stop(run: GoingRun):
    """Let a running run end after the step under way, with a checkpoint; the same `coalign train` then goes on."""
    _ask(run, "stop")


def _ask(run: Path, verb: str) -> None:
    from coalign.cli.ask_run import ask_run
    from coalign.report.display import Display
    from coalign.run_files.control import ControlRequest

    ask_run(run, ControlRequest(verb), Display())


def check(
    config: Config,
    overrides: Overrides = None,
    no_code: NoCode = False,
    cluster: Cluster = None,
    as_json: AsJson = False,
):
    """Validate configuration, data and flow, draw the flow, estimate memory. No weights are loaded."""
    from coalign.config.functions import refuse_code

    refuse_code(no_code)
    report(lambda display, facts: _examine(config, overrides, cluster, display, facts), as_json)


def report(work: Callable[[Display, dict[str, Any]], None], as_json: bool) -> None:
    """Let ``work`` show its results; or, as JSON, print the facts that it collects and the problems that it raises."""
    from coalign.report.display import Display

    if not as_json:
        return work(Display(), {})
    from rich.console import Console

    from coalign.cli.problems import report_as_json

    facts: dict[str, Any] = {}
    with report_as_json(facts):
        work(Display(out=Console(file=StringIO())), facts)


def _examine(
    config: Path, overrides: list[str] | None, cluster: str | None, display: Display, facts: dict[str, Any]
) -> None:
    if ask(CHECKS, "pipeline", config, overrides or [], cluster, display):
        return
    simulated = load(CHECKS, "cluster", "--cluster")(cluster) if cluster else None
    from coalign.api import load_config

    loaded = load_config(config, overrides, planned=True)
    facts["places"] = loaded.locations
    from coalign.launch.check import check as examine  # slow to import: a wrong file is named before

    examine(loaded, display, simulated, facts)


def write_new(text: str, file: Path | None) -> None:
    """Write a file that is not there yet, or the screen."""
    if file is None:
        return typer.echo(text, nl=False)
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        raise ValueError(f"{file} is there already, and is left as it is; name another file") from None
