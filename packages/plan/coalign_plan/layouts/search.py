"""Searches the layouts of a whole run: which models share devices, how many each group gets, how each model is cut.

It goes in two stages. For every division of the devices each model's own layouts are predicted alone, and the fastest
that fit and that the backend accepts are kept; then whole steps are predicted for combinations of these.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

from coalign.config.schema import RunConfig
from coalign_plan.constants import Constants
from coalign_plan.gpus import ClusterSpec
from coalign_plan.job import JobShape
from coalign_plan.layouts.adapter import PlannedRun, build_job, pack_models
from coalign_plan.layouts.candidates import (
    ModelLayout,
    Refusal,
    RejectedLayouts,
    apply_settings,
    find_layouts,
    read_setting,
)
from coalign_plan.memory import PROCESS_BYTES, USABLE
from coalign_plan.prediction import StepPrediction, predict_step

Objective = Literal["seconds", "gpu-hours"]
Groups = tuple[tuple[str, ...], ...]  # the models of a group share devices in turn
KEPT = 2  # layouts of a policy or trainer that are combined with those of other models; one of a scorer
POLICY_SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)  # devices for a policy that shares them with nobody
BUDGET_SECONDS = 45.0  # then the search ends and shows what it has found


@dataclass(frozen=True)
class DeviceDivision:
    """Groups of models that share devices in turn, and the devices of each group."""

    groups: Groups
    devices: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.devices)

    def describe(self) -> str:
        if len(self.groups) == 1:
            return f"all share {self.devices[0]} GPUs" if len(self.groups[0]) > 1 else f"{self.devices[0]} GPUs"
        return ", ".join(
            f"{' + '.join(group)} on {count}" for group, count in zip(self.groups, self.devices, strict=True)
        )


@dataclass(frozen=True)
class PlannedLayout:
    """A layout of a whole run with its prediction. ``settings``: dotted keys of the configuration, and their values."""

    division: DeviceDivision
    settings: Mapping[str, Any]
    run: PlannedRun
    job: JobShape
    prediction: StepPrediction
    peak: float
    staleness: int

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of a step."""
        return self.prediction.seconds * self.division.total / 3600

    def measure(self, objective: Objective) -> float:
        return self.prediction.seconds if objective == "seconds" else self.gpu_hours


@dataclass
class LayoutSearch:
    """The result of a search: layouts, best first; why others were rejected; how many were predicted."""

    layouts: list[PlannedLayout] = field(default_factory=list)
    rejected: RejectedLayouts = field(default_factory=RejectedLayouts)
    predicted: int = 0
    is_complete: bool = True


def search_layouts(
    run: PlannedRun,
    cluster: ClusterSpec,
    constants: Constants,
    *,
    objective: Objective,
    supported: Callable[[str], Sequence[str]],
    refuse: Refusal,
    staleness: Sequence[int],
) -> LayoutSearch:
    """Search the layouts of a run on a cluster. ``staleness``: values of `runtime.max_staleness` to predict.

    ``supported`` names the cuts (coalign.config.schema.PARALLEL) that the backend of a model knows; ``refuse`` says
    why a backend does not take a model's settings.
    """
    search, started_at = LayoutSearch(), time.monotonic()
    layouts: dict[tuple[str, int, int], list[ModelLayout]] = {}
    for division in list_divisions(run, cluster, objective):
        if time.monotonic() - started_at > BUDGET_SECONDS:
            search.is_complete = False
            break
        choices: dict[str, list[ModelLayout]] = {}
        for group, gpus in zip(division.groups, division.devices, strict=True):
            for name in group:
                key = name, gpus, len(group)
                if key not in layouts:
                    budget = USABLE * cluster.memory_bytes - PROCESS_BYTES * len(group)
                    model = run.models[name]
                    layouts[key] = find_layouts(
                        run,
                        model,
                        gpus,
                        cluster,
                        constants,
                        budget,
                        supported(name),
                        refuse,
                        search.rejected,
                        1 if model.role == "scorer" else KEPT,
                    )
                choices[name] = layouts[key]
        for chosen in product(*choices.values()):
            by_model = dict(zip(choices, chosen, strict=True))
            for versions in staleness:
                if planned := _predict(run, division, by_model, cluster, constants, versions):
                    search.layouts.append(planned)
                    search.predicted += 1
    search.layouts.sort(key=lambda layout: layout.measure(objective))
    return search


def list_divisions(run: PlannedRun, cluster: ClusterSpec, objective: Objective) -> Iterator[DeviceDivision]:
    """Yield the divisions of the devices to try: all models in turn, the policy beside the others, learners apart."""
    names = [name for name, model in run.started.items() if model.num_gpu != 0]
    policies = [name for name in names if run.models[name].role == "rollout"]
    remaining = [name for name in names if name not in policies]
    sizes = [cluster.gpus]
    if objective == "gpu-hours":
        while sizes[-1] % 2 == 0 and sizes[-1] > 1:
            sizes.append(sizes[-1] // 2)
    for gpus in sizes:
        yield DeviceDivision((tuple(names),), (gpus,))
        if not policies or not remaining or gpus < 2:
            continue
        learners = [name for name in remaining if run.models[name].role == "trainer"]
        for policy_gpus in _list_shares(gpus, cluster.gpus_per_node):
            yield DeviceDivision((tuple(policies), tuple(remaining)), (policy_gpus, gpus - policy_gpus))
            rest = gpus - policy_gpus
            if len(learners) > 1 and rest % 2 == 0:  # PPO: the value model and the reward model beside the policy's
                second = [name for name in remaining if name in learners[1:] or name == "reward"]
                first = [name for name in remaining if name not in second]
                groups = tuple(policies), tuple(first), tuple(second)
                yield DeviceDivision(groups, (policy_gpus, rest // 2, rest // 2))


def _list_shares(gpus: int, node: int) -> list[int]:
    """Return numbers of devices for a policy of its own: whole nodes, or within a node powers of two."""
    step = node if gpus > node else 1
    counts = {round(gpus * share / step) * step for share in POLICY_SHARES}
    return sorted(count for count in counts if 0 < count < gpus)


def _predict(
    run: PlannedRun,
    division: DeviceDivision,
    layouts: Mapping[str, ModelLayout],
    cluster: ClusterSpec,
    constants: Constants,
    staleness: int,
) -> PlannedLayout | None:
    """Predict a step of a layout; None where it does not allow that staleness, or its models do not fit together."""
    policy = next((name for name in layouts if run.models[name].role == "rollout"), None)
    beside = policy is not None and all(policy not in group or len(group) == 1 for group in division.groups)
    if staleness and (not beside or (policy and layouts[policy].config.pipeline_parallel > 1)):
        return None
    groups = [list(group) for group in division.groups if len(group) > 1]
    settings: dict[str, Any] = {"runtime.colocation": groups}
    if run.config.runtime.max_staleness != staleness and run.generates:
        settings["runtime.max_staleness"] = staleness
    for name, layout in layouts.items():
        settings |= {f"models.{name}.{key}": value for key, value in layout.settings.items()}
    planned = run.with_config(apply_run_settings(run.config, settings))
    try:
        job = build_job(planned, pack_models(planned), cluster)
        prediction = predict_step(job, cluster, constants)
    except ValueError:
        return None
    shared = {name: len(group) for group in division.groups for name in group}
    peak = max(layout.bytes + PROCESS_BYTES * shared[name] for name, layout in layouts.items())
    return PlannedLayout(division, settings, planned, job, prediction, peak, staleness)


def apply_run_settings(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """Return a configuration with other values of dotted keys of `runtime` and of its models."""
    runtime: dict[str, Any] = {}
    models: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        section, _, rest = key.partition(".")
        if section == "runtime":
            runtime[rest] = value
        else:
            name, _, inner = rest.partition(".")
            models.setdefault(name, {})[inner] = value
    changed = {name: apply_settings(config.models[name], values) for name, values in models.items()}
    update = {"runtime": config.runtime.model_copy(update=runtime), "models": {**config.models, **changed}}
    return config.model_copy(update=update)


def find_changes(config: RunConfig, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from those of the configuration, and what `like` would change beside them."""
    changed: set[str] = set()
    for key, value in settings.items():
        section, _, rest = key.partition(".")
        name, _, inner = rest.partition(".")
        section_config = config.runtime if section == "runtime" else config.models[name]
        current = read_setting(section_config, rest if section == "runtime" else inner)
        if current != value and not (rest == "colocation" and _sort_groups(current) == _sort_groups(value)):
            changed.add(key)
    keys = {key.split(".", 2)[2] for key in changed if key.startswith("models.")}
    for key in settings:  # a key that a model takes from another one would follow that one
        section, _, rest = key.partition(".")
        name, _, inner = rest.partition(".")
        if section == "models" and inner in keys and config.models[name].like:
            changed.add(key)
    return {key: value for key, value in settings.items() if key in changed}


def _sort_groups(groups: Sequence[Sequence[str]]) -> list[list[str]]:
    return sorted(sorted(group) for group in groups)
