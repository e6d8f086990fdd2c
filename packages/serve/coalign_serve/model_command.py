"""Commands on models: measure one (`eval`), merge an adapter into one, compare two."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from coalign.cli.train import AsJson, Config, Overrides, report

if TYPE_CHECKING:
    from coalign.report.display import Display


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
    from coalign_serve import api

    def measure(display: Display, facts: dict[str, Any]) -> None:
        facts["metrics"] = api.evaluate(config, overrides, model=model, dtype=dtype)
        display.table("evaluation", facts["metrics"])

    report(measure, as_json)


def merge(
    base: Annotated[Path, typer.Argument(help="A Hugging Face model directory, a name of the hub, or a GGUF file.")],
    adapter: Annotated[Path, typer.Argument(help="A LoRA adapter of that model, in peft's format.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory to write; must not exist or be empty.")],
    dtype: Annotated[Literal["float32", "bfloat16"] | None, typer.Option(help="Default: the base's.")] = None,
):
    """Merge an adapter into its base model: one directory that loads without peft."""
    from coalign.hub import fetch
    from coalign.report.display import Display
    from coalign_serve.weights.merge import merge as write

    write(fetch(str(base)), fetch(str(adapter)), output, dtype=dtype)
    Display().note(f"{base} + {adapter} -> {output}")


def check_sync(
    sides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Two directories with weights (Hugging Face, a checkpoint, a run folder); with --config, settings "
            "that replace those of the file."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A run's YAML: start its models, sync, compare their weights and log-probs.")
    ] = None,
):
    """Compare two sets of weights, tensor by tensor. Exit code 1 if they differ."""
    from coalign.api import load_config
    from coalign.report.display import Display
    from coalign_serve.weights.check_sync import check_run, check_saved

    if config is not None:
        same = check_run(load_config(config, sides), Display())
    elif sides is not None and len(sides) == 2:
        same = check_saved(Path(sides[0]), Path(sides[1]), Display())
    else:
        raise typer.BadParameter("give two directories, or --config and a run's YAML")
    raise typer.Exit(0 if same else 1)
