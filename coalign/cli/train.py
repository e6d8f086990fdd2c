"""Commands on a YAML file (train, check, eval, …) and on a run (watch, save, stop, scale, explain, diagnose); init."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated, Any, Literal

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
    run: GoingRun,
    processes: Annotated[list[str], typer.Argument(help="Processes by model: `policy=4 trainer=2`.")],
):
    """Give models of a running run more processes or fewer, between two steps, and wait for the run's answer."""
    from coalign.commands.ask_run import scale_run
    from coalign.report.display import Display

    scale_run(run, processes, Display())


def save(run: GoingRun):
    """Let a running run write a checkpoint after the step under way, and wait until it is complete."""
    _ask(run, "save")


def stop(run: GoingRun):
    """Let a running run end after the step under way, with a checkpoint; the same `coalign train` then goes on."""
    _ask(run, "stop")


def _ask(run: Path, verb: str) -> None:
    from coalign.commands.ask_run import ask_run
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
    _refuse(no_code)
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


def evaluate(
    config: Config,
    overrides: Overrides = None,
    model: Annotated[
        Path | None, typer.Option(help="Evaluate this model directory instead of the configuration's.")
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(
            help="Of --model. auto: bfloat16 if it is stored in 16 bits or fewer and the device multiplies it."
        ),
    ] = "auto",
    as_json: AsJson = False,
):
    """Measure a model on the evaluation set of a run: mean@n, pass@k (or the loss, for SFT)."""
    from coalign import api

    def measure(display: Display, facts: dict[str, Any]) -> None:
        facts["metrics"] = api.evaluate(config, overrides, model=model, dtype=dtype)
        display.table("evaluation", facts["metrics"])

    report(measure, as_json)


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
    _refuse(no_code)
    from coalign.api import load_config
    from coalign.files import require_free_output
    from coalign.report.display import Display

    loaded = load_config(config, overrides, planned=True)
    if thumbnails is not None:
        require_free_output(thumbnails, [config, *(source.path for source in loaded.data.train)], overwrite=overwrite)
    from coalign.commands.evaluate import show_data

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
    from coalign.launch.template import RunTemplate

    write_new(RunTemplate(recipe).write(full=full), file)


def write_new(text: str, file: Path | None) -> None:
    """Write a file that is not there yet, or the screen."""
    if file is None:
        return typer.echo(text, nl=False)
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        raise ValueError(f"{file} is there already, and is left as it is; name another file") from None


def recipes():
    """List the recipes: what each is, the rows of data that it takes, and its models."""
    from coalign.launch.template import describe_recipes

    for line in describe_recipes(min(100, get_terminal_size().columns)):
        typer.echo(line)


def schema(no_code: NoCode = False):
    """Print the JSON Schema of the YAML, for editors."""
    _refuse(no_code)
    from coalign.config.export import build_json_schema

    typer.echo(json.dumps(build_json_schema(), indent=1))


def _refuse(no_code: bool) -> None:
    from coalign.config.functions import refuse_code

    refuse_code(no_code)
