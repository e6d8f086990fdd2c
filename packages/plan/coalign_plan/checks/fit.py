"""Whether a run fits: this machine, or a cluster that need not be there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

from coalign.cluster.choice import plan_slots
from coalign.config import ConfigError
from coalign.config.schema import RunConfig
from coalign.launch.check import CheckReport, RowLengths
from coalign.launch.plan import Plan
from coalign_plan.checks.cluster_check import describe_groups, place_models
from coalign_plan.checks.memory_table import (
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
from coalign_plan.checks.planned_run import describe_run
from coalign_plan.checks.refusal import offer_layout
from coalign_plan.gpus import ClusterSpec
from coalign_plan.layouts.devices import DeviceLoad, Estimates
from coalign_plan.layouts.partition import ModelRole


def report_memory(
    report: CheckReport, plan: Plan, fetched: RunConfig, cluster: ClusterSpec | None, lengths: RowLengths | None
) -> tuple[list[str], str]:
    """Add what models and devices hold; return remarks, and why the run does not fit this machine (empty if it does).

    ValueError, with a layout that fits, if a device of ``cluster`` cannot hold its part.
    """
    estimates = estimate_models(plan, cluster, lengths=lengths)
    loads = list_loads(plan, estimates)
    report.add(build_memory_table(estimates), memory=list_memory_facts(estimates))
    if cluster is None:
        return _report_demands(report, plan, estimates, loads)
    _report_devices(report, loads, fetched, cluster)
    return [""], ""


def report_placement(report: CheckReport, plan: Plan, fetched: RunConfig, cluster: ClusterSpec) -> None:
    """Add on which nodes of a cluster each model would be. ConfigError, with a layout, if they lack the devices."""
    roles: dict[str, ModelRole] = {name: find_role(model.role) for name, model in plan.models.items()}
    report.add("")
    try:
        placement = place_models(plan.started, plan.config, cluster)
    except ConfigError as error:
        offer = _offer_layout(fetched, cluster)
        raise ConfigError(replace(problem, message=problem.message + offer) for problem in error.problems) from error
    report.add(describe_groups(placement, plan.started, roles))


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
    return offer_layout(describe_run(config, cluster), cluster)
