"""`coalign plan`: predicts the step of a run on a cluster before anybody pays for it, and searches better layouts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coalign.config import locate_problems
from coalign.config.schema import RunConfig
from coalign.config.yaml_reader import emit_inline
from coalign.report.display import Display
from coalign_plan.checks.planned_run import describe_run
from coalign_plan.constants import Constants, load_machine
from coalign_plan.gpus import LARGEST, ClusterSpec
from coalign_plan.job import LengthDistribution
from coalign_plan.layouts.adapter import PlannedRun, build_job, list_run_loads, pack_models
from coalign_plan.layouts.devices import DeviceLoad
from coalign_plan.layouts.search import LayoutSearch, Objective, find_changes, search_layouts
from coalign_plan.prediction import StepPrediction, predict_step
from coalign_plan.report.page import THE_RUN, PlanPage, ProposedLayout, format_settings
from coalign_plan.report.step_trace import draw_trace

ASYNCHRONOUS = 4  # weight versions of an asynchronous run, where the configuration asks for none or one
MAX_DOUBLINGS = 5  # how often the nodes are doubled where nothing fits
LoadWith = Callable[[Mapping[str, Any]], RunConfig]  # the configuration with more settings, validated


@dataclass(frozen=True)
class PlanRequest:
    """What was asked on the command line."""

    cluster: ClusterSpec
    constants: Constants
    lengths: LengthDistribution | None = None
    objective: Objective = "seconds"
    top: int = 5
    price: float | None = None  # dollars of a GPU-hour
    write: Path | None = None
    trace: Path | None = None
    devices: int | None = None  # that `num_gpu: auto` may use, if not all of the cluster


def plan_run(source: Path, load: LoadWith, request: PlanRequest, display: Display) -> dict[str, Any]:
    """Print the prediction of a run's step on a cluster, and the layouts that would do better; return the figures.

    ``load`` gives the configuration of the file ``source`` with further settings. Raises ValueError for a run that
    cannot be planned, and for files to write that are there already.
    """
    proposed: list[ProposedLayout] = []
    for file in (request.write, request.trace):
        if file is not None and file.exists():
            raise ValueError(f"{file} is there already, and is left as it is; name another file")
    config = load({})
    with locate_problems(config):
        run = describe_run(config, request.cluster, request.lengths, request.devices)
        page = PlanPage(request.cluster, request.price, run)
        configured = predict_configured(run, request)
        display.show(page.show_configured(configured))
        if request.top and not any(model.devices for model in run.started.values()):
            display.show("no model has devices, so there are no layouts to search")
        elif request.top:
            search = search_run(run, request)
            proposed = choose_layouts(search, run, load, request)
            display.show(page.show_search(search, proposed, configured, request.objective))
            if not proposed:
                larger = find_larger_cluster(config, load, request)
                if larger is None:
                    display.show(f"none fits with up to {2**MAX_DOUBLINGS} times the nodes either")
                else:
                    display.show(f"with more such nodes, a layout fits: --cluster {larger}")
            if request.write is not None:
                write_layout(source, request.write, proposed, display)
    facts = page.list_facts(configured, proposed)
    if request.trace is not None:
        best = configured.prediction
        if best is None:
            raise ValueError("--trace: the configured layout cannot be predicted, so there is nothing to draw")
        display.show(draw_trace(best, Path(config.output), request.trace))
    return facts


def find_machine(*, measure: bool, display: Display) -> tuple[ClusterSpec, Constants, int]:
    """Return this machine as a cluster, its constants, and the devices that `num_gpu: auto` may use.

    ``measure``: measure it now and keep the figures; otherwise take those that were kept. ValueError without any.
    """
    import torch

    from coalign_plan.report.probe import FOLDER, measure_machine, name_machine

    file = FOLDER / f"{name_machine()}.json"
    if not measure and not file.is_file():
        raise ValueError(f"--cluster here: this machine is not measured yet ({file}); add --measure")
    machine = measure_machine(display.show)[0] if measure else load_machine(file)
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    return ClusterSpec(1, max(devices, 1), machine.gpu, machine.gpu.network_gb_s), machine.constants, devices


@dataclass(frozen=True)
class ConfiguredLayout:
    """The layout that the configuration asks for: its predictions by `max_staleness`, and why it has none."""

    run: PlannedRun
    predictions: Mapping[int, StepPrediction]
    loads: Sequence[DeviceLoad]
    problem: str | None = None

    @property
    def prediction(self) -> StepPrediction | None:
        return self.predictions.get(self.run.config.runtime.max_staleness)


def predict_configured(run: PlannedRun, request: PlanRequest) -> ConfiguredLayout:
    """Predict the layout that the configuration asks for, synchronous and asynchronous where it can be."""
    cluster = request.cluster
    try:
        slots = pack_models(run)
        loads = list_run_loads(run, slots, cluster)
    except ValueError as problem:
        return ConfiguredLayout(run, {}, (), str(problem))
    predictions: dict[int, StepPrediction] = {}
    problem = None
    for staleness in list_staleness(run):
        policy = next((name for name, model in run.models.items() if model.role == "rollout"), None)
        if staleness and (policy is None or len(slots[policy].positions) > 1):
            continue  # it takes turns with its trainer, so neither can go on while the other computes
        try:
            job = build_job(run, slots, cluster, staleness)
            predictions[staleness] = predict_step(job, cluster, request.constants)
        except ValueError as error:
            problem = str(error)
    return ConfiguredLayout(run, predictions, loads, problem)


def list_staleness(run: PlannedRun) -> list[int]:
    """List the values of `runtime.max_staleness` to predict: none, one step ahead, and the configured or several."""
    configured = run.config.runtime.max_staleness
    return sorted({0, 1, configured if configured > 1 else ASYNCHRONOUS}) if run.generates else [0]


def search_run(run: PlannedRun, request: PlanRequest) -> LayoutSearch:
    """Search layouts that the backends of the run's models accept."""
    from coalign_plan.checks.refusal import BackendRefusal  # imports the backends

    backends = BackendRefusal(run.config)
    return search_layouts(
        run,
        request.cluster,
        request.constants,
        objective=request.objective,
        supported=backends.list_cuts,
        refuse=backends.find_refusal,
        staleness=list_staleness(run),
    )


def find_larger_cluster(config: RunConfig, load: LoadWith, request: PlanRequest) -> ClusterSpec | None:
    """Return the cluster with two, four, … times the nodes on which the first layout fits, or None.

    None as well for a cluster that would be larger than any that can be planned.
    """
    for doublings in range(1, MAX_DOUBLINGS + 1):
        cluster = replace(request.cluster, nodes=request.cluster.nodes * 2**doublings)
        if cluster.gpus > LARGEST:
            return None
        larger = replace(request, cluster=cluster, devices=None)
        run = describe_run(config, cluster, request.lengths)
        if choose_layouts(search_run(run, larger), run, load, larger):
            return cluster
    return None


def choose_layouts(search: LayoutSearch, run: PlannedRun, load: LoadWith, request: PlanRequest) -> list[ProposedLayout]:
    """Return the best layouts that a run would accept, one for each division of the devices, best first.

    They are as stale as the configuration allows; the best of those that are more so come last.
    """
    from coalign_plan.checks.refusal import check_layout

    allowed = run.config.runtime.max_staleness
    proposed: list[ProposedLayout] = []
    seen: set[Any] = set()
    modes: set[int] = set()
    for layout in search.layouts:
        more = layout.staleness > allowed
        if layout.division in seen and not more:
            continue
        if more and (layout.staleness in modes or request.top < 2):
            continue
        if not more and sum(not one.is_staler for one in proposed) >= request.top:
            continue
        lines = find_changes(run.config, layout.settings)
        if reason := check_layout(load, lines, request.cluster):
            search.rejected.add(THE_RUN, reason)
            continue
        seen |= set() if more else {layout.division}
        modes |= {layout.staleness} if more else set()
        proposed.append(ProposedLayout(layout, lines, is_staler=more))
    return sorted(proposed, key=lambda one: (one.is_staler, one.layout.measure(request.objective)))


def write_layout(source: Path, target: Path, proposed: Sequence[ProposedLayout], display: Display) -> None:
    """Write a configuration that includes ``source`` and sets the best layout. ValueError if none was found."""
    if not proposed:
        raise ValueError("--write: no layout was found that fits, so nothing is written")
    settings = proposed[0].lines
    included = emit_inline(os.path.relpath(source, target.parent))
    with target.open("x", encoding="utf-8") as file:
        file.write("\n".join([f"include: {included}", *(format_settings(settings) if settings else ())]) + "\n")
    display.show(f"written: {target}, {source} with the lines of layout 1")
