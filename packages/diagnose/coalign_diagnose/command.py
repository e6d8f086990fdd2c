"""The commands that say what is wrong: doctor before a run, explain beside it, diagnose after it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    config: Annotated[Path | None, typer.Argument(help="The YAML file of the run to come.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings that replace those of the file.")] = None,
    address: Annotated[
        str | None, typer.Option(help="A Ray cluster whose nodes to check: HOST:6379, or `auto`. Default: the run's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
):
    """Check this machine, or every node of a cluster, before a run: a table, and exit code 1 if anything failed."""
    from coalign.api import load_config
    from coalign.report.display import Display

    loaded = None if config is None else load_config(config, overrides, planned=True)
    from coalign_diagnose.doctor.doctor import diagnose

    raise typer.Exit(diagnose(loaded, address, Display(), as_json=as_json))


def explain(
    run: Annotated[Path, typer.Argument(help="The folder of a run with rollouts.")],
    group: Annotated[int | None, typer.Option("--group", "-g", help="The life of this group of samples.")] = None,
    step: Annotated[int | None, typer.Option("--step", "-s", help="The groups that this step trained on.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
):
    """Say what became of a run's groups of samples: which were trained on, which were dropped, and why."""
    from coalign_diagnose.explain import explain as describe

    typer.echo(describe(run, group, step, as_json))


def diagnose(
    logs: Annotated[
        list[str], typer.Argument(help="A run's folder, log files, directories of the logs of many ranks, or `-`.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
):
    """Name the cause of a run that ended badly, from its logs: evidence, where it began, how sure it is, what to do.

    Exit code 1 if the logs hold no cause that it knows.
    """
    from coalign_diagnose.report import diagnose as find_cause

    answer, code = find_cause(logs, as_json=as_json)
    typer.echo(answer)
    raise typer.Exit(code)
