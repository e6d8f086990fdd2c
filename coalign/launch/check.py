"""`coalign check`: configuration, flow, losses and memory of a run, seen before anything loads."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from coalign.algorithms.segments import LossTotals
from coalign.backends.base import Module, Objective, loss_input
from coalign.cluster.base import Cluster, plan_slots
from coalign.cluster.dry import STANDINS, DryCluster, FlowGraph, TracedCall, describe_graph, draw_graph
from coalign.cluster.future import Call
from coalign.cluster.placement.nodes import find_accelerator
from coalign.config import ConfigError, locate_problems
from coalign.config.errors import ConfigProblem
from coalign.config.functions import resolve_class
from coalign.config.schema import ModelConfig, RunConfig
from coalign.devices import count_devices
from coalign.engine.hooks.guards import check_reported
from coalign.engine.reward import combine_rewards, describe_reward, list_reward_facts
from coalign.hub import is_hub_name
from coalign.launch.data_check import check_data, list_warnings
from coalign.launch.devices import check_devices
from coalign.launch.fetch import fetch_sources
from coalign.launch.layout import describe_requested_layout
from coalign.launch.memory_table import (
    build_device_table,
    build_memory_table,
    describe_excess,
    describe_loads,
    estimate_models,
    find_overload,
    find_role,
    list_demands,
    list_loads,
    list_memory_facts,
)
from coalign.launch.plan import Plan, PlannedModel, describe_models, prepare
from coalign.launch.validate import check_context, check_directories, check_folders, check_rope, check_weights
from coalign.report.display import Display
from coalign.types import LossInput

if TYPE_CHECKING:
    from rich.console import RenderableType

    from coalign.planner.gpus import ClusterSpec
    from coalign.planner.layouts.devices import DeviceLoad, Estimates
    from coalign.planner.layouts.partition import ModelRole

# What a model with this head hands to its loss.
OUTPUTS = {"lm": ("logprobs",), "value": ("values",), "reward": ("scores",)}


@dataclass
class CheckReport:
    """What `coalign check` says of a run: shown while it goes on, and kept as ``facts`` for `--json`."""

    display: Display
    facts: dict[str, Any]

    def add(self, *shown: RenderableType, **facts: Any) -> None:
        """Show texts and tables, and keep facts (what JSON can hold) by name."""
        self.facts |= facts
        for content in shown:
            self.display.show(content)


def check(
    config: RunConfig, display: Display, cluster: ClusterSpec | None = None, facts: dict[str, Any] | None = None
) -> None:
    """Print what the run would do. Raises ValueError for whatever would stop it.

    Of models of the hub it fetches configuration and tokenizer, no weights; of data of the hub which files there are.
    Of files that are here it reads the first rows. With ``cluster`` the run is placed on that one, which need not be
    there, and refused if a device would not hold its part. ``facts`` is filled with what is printed, for JSON.
    """
    report = CheckReport(display, {} if facts is None else facts)
    fetched = fetch_sources(config, weights=False, rows=False)
    plan = prepare(fetched, devices=cluster.gpus) if cluster else prepare(fetched)
    _report_flow(report, plan)
    planned = [model for model in plan.models.values() if _is_planned(model.config.load)]
    present = [model for model in plan.models.values() if model not in planned]
    with locate_problems(plan.config):
        notes = _check_models(plan, present, simulated=cluster is not None)
        data = check_data(plan, present, simulated=cluster is not None)
    report.add("\n".join([*data.lines, ""]), data=data.sources, warnings=list_warnings(data.lines))
    if rewards := describe_reward(plan.rewards, plan.configs):
        report.add(rewards + "\n", reward=list_reward_facts(plan.rewards))
    _report_placement(report, plan, fetched, cluster)
    excess = ""
    if planned:
        report.add(*_describe_planned(planned))
    else:
        estimates = estimate_models(plan, cluster, lengths=data.lengths)
        loads = list_loads(plan, estimates)
        report.add(build_memory_table(estimates), memory=list_memory_facts(estimates))
        if cluster is None:
            remarks, excess = _report_demands(report, plan, estimates, loads)
            notes = [*remarks, *notes]
        else:
            _report_devices(report, loads, fetched, cluster)
            notes = ["", *notes]
    report.add(*notes, notes=[note for note in notes if note])
    if excess:
        report.facts["warnings"].append(excess)
    report.add(f"\nwarning: {excess}" if excess else "\nno problem found")


def _report_flow(report: CheckReport, plan: Plan) -> None:
    """Add what the run is, and the calls of a step. Raises what `trace` raises."""
    config, graph = plan.config, trace(plan)
    count = f"{len(plan.models)} models" if len(plan.models) > 1 else "1 model"
    steps = config.runtime.steps or f"{config.runtime.epochs} epochs of"
    report.add(
        f"{config.algorithm}: {count}, {steps} steps\n",
        draw_graph(graph) + "\n",
        algorithm=config.algorithm,
        steps=config.runtime.steps,
        epochs=config.runtime.epochs if config.runtime.steps is None else None,
        output=config.output,
        flow=describe_graph(graph),
    )


def _check_models(plan: Plan, present: Sequence[PlannedModel], *, simulated: bool) -> list[str]:
    """Raise what the models that are there would raise when a run sets them up; return remarks on them."""
    config = plan.config
    check_directories(present)
    check_folders(config)
    check_context(present)
    check_rope(present, config, plan.recipe.source)
    for model in present:
        _check_backend(model, config, simulated=simulated)
    check_weights(present, simulated=simulated)
    loaded = [model for model in present if model.config.load]
    return [f"{model.name}: {note}" for model in loaded for note in model.module.notes(model.config)]


def _report_placement(report: CheckReport, plan: Plan, fetched: RunConfig, cluster: ClusterSpec | None) -> None:
    """Add where the models compute. ConfigError for devices that are not there."""
    with locate_problems(plan.config):
        report.add(describe_requested_layout(plan.started, plan.config), models=describe_models(plan))
        if plan.devices:
            report.add(plan.devices)
        if cluster is None:
            check_devices(plan.started, plan.config)
        else:
            _report_groups(report, plan, fetched, cluster)
    report.add("")


def _report_groups(report: CheckReport, plan: Plan, fetched: RunConfig, cluster: ClusterSpec) -> None:
    from coalign.launch.cluster_check import describe_groups, place_models  # with the planner, which no run needs

    roles: dict[str, ModelRole] = {name: find_role(model.role) for name, model in plan.models.items()}
    report.add("")
    try:
        placement = place_models(plan.started, plan.config, cluster)
    except ConfigError as error:
        offer = _offer_layout(fetched, cluster)
        raise ConfigError(replace(problem, message=problem.message + offer) for problem in error.problems) from error
    report.add(describe_groups(placement, plan.started, roles))


def _describe_planned(models: Sequence[PlannedModel]) -> Iterator[str]:
    """Yield which models are not there yet."""
    for load in dict.fromkeys(model.config.load for model in models):
        names = ", ".join(model.name for model in models if model.config.load == load)
        yield (
            f"{names}: {load} is not there yet, a run with `output: {Path(str(load)).parent}` makes it; its "
            "backend and memory are not checked"
        )


def _report_demands(
    report: CheckReport, plan: Plan, estimates: Estimates, loads: Sequence[DeviceLoad]
) -> tuple[list[str], str]:
    """Add what the run takes of this machine; return remarks, and why it does not fit (empty if it does)."""
    demands = list_demands(plan, estimates, loads)
    report.add(demands=[asdict(demand) | {"usable": int(demand.usable)} for demand in demands])
    shared = describe_loads(loads, plan_slots(plan.started, plan.config.runtime.colocation), plan.config)
    excess = [demand for demand in demands if demand.bytes > demand.usable]
    return [*map(str, demands), *shared], describe_excess(excess) if excess else ""


def _report_devices(report: CheckReport, loads: Sequence[DeviceLoad], fetched: RunConfig, cluster: ClusterSpec) -> None:
    """Add what each device of a cluster holds. ValueError, with a layout that fits, if one cannot."""
    devices = [{"devices": load.count, "peak": load.peak, "turn": load.turn, "holds": [*load.stages]} for load in loads]
    report.add("", build_device_table(loads, cluster), devices=devices)
    if problem := find_overload(loads, cluster):
        raise ValueError(problem + _offer_layout(fetched, cluster))


def _offer_layout(config: RunConfig, cluster: ClusterSpec) -> str:
    from coalign.launch.planned_run import describe_run
    from coalign.launch.refusal import offer_layout

    return offer_layout(describe_run(config, cluster), cluster)


def _is_planned(load: str | None) -> bool:
    """Whether `load` names the directory of a model that another run will make."""
    return load is not None and not is_hub_name(load) and not Path(load).exists()


def trace(plan: Plan) -> FlowGraph:
    """The calls of one step, from a run of the flows on stand-ins. ValueError for a column that nobody produces, a loss
    that cannot do with what it gets, or a guard on what the loss does not report."""
    with DryCluster(plan.config) as cluster:
        engine = plan.recipe(plan, cast(Cluster, cluster))  # it has the part of a cluster's interface that flows use
        make = STANDINS[plan.recipe.source]
        with engine.unfinished.roll_out():
            samples = engine.env_flow(cluster.put(make(), plan.recipe.source))
        engine.train_flow(cluster.resolve(samples))
        training = list(cluster.graph.calls)
        if plan.config.data.eval:
            engine.eval_flow(cluster.put(make(), plan.recipe.source))
        _check_sections(plan, engine.sections_read, [call.made_by for call in cluster.graph.calls])
    for call in training:
        model = plan.models.get(call.made_by.model or "")
        if model is not None and model.objective is not None and call.made_by.method == "train_step":
            reported = _try_loss(model, model.objective, call)
            if model is plan.learning[0]:
                check_reported(plan.config.runtime.guards, reported)
    return FlowGraph(training)


def _check_sections(plan: Plan, read: Collection[str], calls: Sequence[Call]) -> None:
    """Raise ConfigError for a section that was set, and that the flows ask for nowhere."""
    ways: dict[str, str] = {
        **dict.fromkeys(("advantage", "covariance", "truncated", "kl"), "`self.apply(self.advantage, batch)`"),
        "pairs": '`self.read_section("pairs")`',
    }
    unread = [name for name in ways if name not in read and _is_set(name, plan)]
    is_scored = "reward" in plan.recipe.evaluates or any(call.method == combine_rewards.__name__ for call in calls)
    if plan.config.reward and not is_scored:
        unread, ways["reward"] = [*unread, "reward"], "`self.reward.forward_step(batch)`"
    if unread:
        message = f"the flows of `{plan.config.algorithm}` never ask for it: call {{}} there, or leave the section out"
        with locate_problems(plan.config):
            raise ConfigError([ConfigProblem((name,), message.format(ways[name])) for name in unread])


def _is_set(name: str, plan: Plan) -> bool:
    """Whether a section is there and is not the recipe's default."""
    section, default = getattr(plan.config, name), plan.recipe.defaults.get(name)
    return section is not None and (default is None or section != type(section).model_validate(default))


def _try_loss(model: PlannedModel, objective: Objective, call: TracedCall) -> list[str]:
    """Run a model's loss on the stand-ins that its train_step receives; the names of the metrics it reports."""
    batch = call.batch
    assert batch is not None, "train_step takes a batch"
    trained = batch["loss_mask"]
    sizes = {"logprobs": int(trained.sum()), "values": int(trained.sum()), "scores": len(batch)}
    outputs = {output: torch.zeros(sizes[output], requires_grad=True) for output in OUTPUTS[model.config.head]}
    for measured in {"entropy", "collision"} & set(objective.needs):
        outputs[measured] = torch.zeros(sizes["logprobs"])
    if "candidate_logprobs" in objective.needs and "candidates" in batch:
        outputs["candidate_logprobs"] = torch.zeros(batch["candidates"][trained].shape)
    have: LossInput = loss_input(batch, outputs)
    try:
        _, stats = objective(batch, outputs, LossTotals(1.0, 1.0, 1.0))
    except (TypeError, AttributeError, ValueError) as problem:
        missing = sorted(
            f for f in ("ref", "advantages", "returns", "old_values", "scores") if getattr(have, f) is None
        )
        raise ValueError(
            f"models.{model.name}: the loss `{objective.name}` fails on what the flow gives it ({problem}); "
            f"of its inputs these are not there: {', '.join(missing)}"
        ) from problem
    return [f"loss/{stat}" for stat in stats]


def _check_backend(model: PlannedModel, config: RunConfig, *, simulated: bool) -> None:
    """Raise what the setup of a model would raise before it reads weights. ``simulated``: on other machines."""
    device = torch.device(find_accelerator(config.runtime.accelerator).device if model.config.devices else "cpu")
    # A cache, or a template to read by, and the backend behind it.
    for module in dict.fromkeys((model.module, resolve_class(model.config.module, "coalign.backends"))):
        module.check_settings(model.config, model.name, device)
        if model.config.load:
            _check_architecture(module, model.config, model.name)
        if model.context.routing_replay:
            module.check_routing_replay(model.config, model.name)
        if not simulated and _runs_here(device, config):
            module.check_machine(model.config, model.name, device)


def _check_architecture(module: type[Module], model: ModelConfig, name: str) -> None:
    try:
        module.check_architecture(model, name)
    except (ValueError, NotImplementedError) as problem:
        if str(problem).startswith(f"models.{name}"):
            raise
        raise ValueError(f"models.{name}.load: {problem}") from problem


def _runs_here(device: torch.device, config: RunConfig) -> bool:
    """Whether this machine is one of those that compute, as far as it is known before the run starts."""
    return not config.runtime.ray_address and (device.type == "cpu" or count_devices(device.type) > 0)
