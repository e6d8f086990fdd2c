"""`coalign plan`: the seconds, memory and cost of a step on a cluster that need not be there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coalign.cli.train import AsJson, Cluster, Config, NoCode, Overrides, report
from coalign.config.functions import refuse_code

if TYPE_CHECKING:
    from coalign.report.display import Display


def plan(
    config: Config,
    overrides: Overrides = None,
    cluster: Cluster = None,
    lengths: Annotated[
        str | None, typer.Option(help="Response lengths in tokens: MEAN,MAX, or a file of one length a line.")
    ] = None,
    objective: Annotated[
        str, typer.Option(help="What the best layouts are best at: seconds or gpu-hours.")
    ] = "seconds",
    top: Annotated[int, typer.Option(min=0, help="How many layouts to propose; 0: do not search.")] = 5,
    price: Annotated[float | None, typer.Option(min=0.0, help="Dollars of a GPU-hour.")] = None,
    write: Annotated[
        Path | None, typer.Option(help="A new file that includes this one and sets the best layout.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="A new file, .png or .json: the predicted step beside a measured one.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure this machine first, keep the figures, and plan for it.")
    ] = False,
    no_code: NoCode = False,
    as_json: AsJson = False,
):
    """Predict the seconds, memory and cost of a step on a cluster that need not be there, and search better layouts."""
    refuse_code(no_code)

    def predict(display: Display, facts: dict[str, Any]) -> None:
        from coalign.api import load_config
        from coalign.config.yaml_reader import emit_inline
        from coalign_plan.constants import Constants
        from coalign_plan.gpus import ClusterSpec
        from coalign_plan.job import LengthDistribution

        if cluster is None and not measure:
            raise ValueError("--cluster is missing: NODESxGPUS:NAME, such as `--cluster 4x8:H100`, or `here`")
        if measure and cluster not in (None, "here"):
            raise ValueError(f"--measure is for this machine, and --cluster names {cluster}; leave one of them out")
        if objective not in ("seconds", "gpu-hours"):
            raise ValueError(f"--objective is '{objective}'; expected seconds or gpu-hours")
        here = measure or cluster == "here"
        simulated = None if here or cluster is None else ClusterSpec.parse(cluster)
        distribution = LengthDistribution.parse(lengths) if lengths else None

        configured = load_config(config, overrides, planned=True)

        def load(settings):
            more = [f"{key}={emit_inline(value)}" for key, value in settings.items()]
            return load_config(config, [*(overrides or []), *more], planned=True) if more else configured

        from coalign_plan.report.run_plan import (
            PlanRequest,
            find_machine,
            plan_run,
        )  # slow to import: a wrong file is named before

        constants, devices = Constants(), None
        if simulated is None:
            simulated, constants, devices = find_machine(measure=measure, display=display)
        request = PlanRequest(simulated, constants, distribution, objective, top, price, write, trace, devices)
        facts.update(plan_run(config, load, request, display))

    report(predict, as_json)
