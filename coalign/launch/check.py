"""`coalign check`: configuration, flow, losses and memory of a run, seen before anything loads."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from coalign.algorithms.segments import LossTotals
from coalign.backends.base import Module, Objective, loss_input
from coalign.cluster.base import Cluster, plan_slots
from coalign.cluster.dry import STANDINS, DryCluster, FlowGraph, TracedCall, draw_graph
from coalign.cluster.future import Call
from coalign.cluster.placement.nodes import find_accelerator
from coalign.config import ConfigError, locate_problems
from coalign.config.errors import ConfigProblem
from coalign.config.functions import resolve_class
from coalign.config.schema import ModelConfig, RunConfig
from coalign.devices import count_devices
from coalign.engine.hooks.guards import check_reported
from coalign.engine.reward import combine_rewards, describe_reward
from coalign.hub import is_hub_name
from coalign.launch.cluster_check import describe_groups, place_models
from coalign.launch.data_check import check_data
from coalign.launch.devices import check_devices
from coalign.launch.fetch import fetch_sources
from coalign.launch.layout import describe_requested_layout
from coalign.launch.memory_table import (
    MemoryDemand,
    build_device_table,
    build_memory_table,
    describe_excess,
    describe_loads,
    estimate_models,
    find_overload,
    find_role,
    list_demands,
    list_loads,
)
from coalign.launch.plan import Plan, PlannedModel, prepare
from coalign.launch.planned_run import describe_run
from coalign.launch.refusal import offer_layout
from coalign.launch.validate import check_context, check_directories, check_folders, check_rope, check_weights
from coalign.planner.gpus import ClusterSpec
from coalign.planner.layouts.partition import ModelRole
from coalign.report.display import Display
from coalign.types import LossInput

# What a model with this head hands to its loss.
OUTPUTS = {"lm": ("logprobs",), "value": ("values",), "reward": ("scores",)}


def check(config: RunConfig, display: Display, cluster: ClusterSpec | None = None) -> None:
    """Print what the run would do. Raises ValueError for whatever would stop it.

    Of models of the hub it fetches configuration and tokenizer, no weights; of data of the hub which files there are.
    Of files that are here it reads the first rows. With ``cluster`` the run is placed on that one, which need not be
    there, and refused if a device would not hold its part.
    """
    fetched = fetch_sources(config, weights=False, rows=False)
    plan = prepare(fetched, devices=cluster.gpus) if cluster else prepare(fetched)
    config = plan.config
    graph = trace(plan)
    count = f"{len(plan.models)} models" if len(plan.models) > 1 else "1 model"
    display.show(f"{config.algorithm}: {count}, {config.runtime.steps or f'{config.runtime.epochs} epochs of'} steps\n")
    display.show(draw_graph(graph) + "\n")
    planned = [model for model in plan.models.values() if _is_planned(model.config.load)]
    with locate_problems(config):
        present = [model for model in plan.models.values() if model not in planned]
        check_directories(present)
        check_folders(config)
        check_context(present)
        check_rope(present, config, plan.recipe.source)
        for model in present:
            _check_backend(model, config, simulated=cluster is not None)
        check_weights(present, simulated=cluster is not None)
        notes = [
            f"{model.name}: {note}"
            for model in present
            if model.config.load
            for note in model.module.notes(model.config)
        ]
        data = check_data(plan, present, simulated=cluster is not None)
        display.show("\n".join([*data.lines, ""]))
    if rewards := describe_reward(plan.rewards, plan.configs):
        display.show(rewards + "\n")
    with locate_problems(config):
        display.show(describe_requested_layout(plan.started, config))
        if plan.devices:
            display.show(plan.devices)
        if cluster is None:
            check_devices(plan.started, config)
        else:
            roles: dict[str, ModelRole] = {name: find_role(model.role) for name, model in plan.models.items()}
            display.show("")
            try:
                placement = place_models(plan.started, config, cluster)
            except ConfigError as error:
                offer = offer_layout(describe_run(fetched, cluster), cluster)
                problems = [replace(problem, message=problem.message + offer) for problem in error.problems]
                raise ConfigError(problems) from error
            display.show(describe_groups(placement, plan.started, roles))
    display.show("")
    demands: list[MemoryDemand] = []
    if planned:
        for load in dict.fromkeys(model.config.load for model in planned):
            names = ", ".join(model.name for model in planned if model.config.load == load)
            display.show(
                f"{names}: {load} is not there yet, a run with `output: {Path(str(load)).parent}` makes it; its "
                "backend and memory are not checked"
            )
    else:
        estimates = estimate_models(plan, cluster, lengths=data.lengths)
        display.show(build_memory_table(estimates))
        loads = list_loads(plan, estimates)
        if cluster is None:
            notes = [*describe_loads(loads, plan_slots(plan.started, config.runtime.colocation), config), *notes]
            demands = list_demands(plan, estimates, loads)
            notes = [*map(str, demands), *notes]
        else:
            display.show("")
            display.show(build_device_table(loads, cluster))
            if problem := find_overload(loads, cluster):
                raise ValueError(problem + offer_layout(describe_run(fetched, cluster), cluster))
            notes = ["", *notes]
    for line in notes:
        display.show(line)
    if excess := [demand for demand in demands if demand.bytes > demand.usable]:
        display.show(f"\nwarning: {describe_excess(excess)}")
    else:
        display.show("\nno problem found")


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
