"""Asks the code of a run whether it takes a layout: its schema, its backends, its placement. Nothing is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from coalign.cluster.choice import find_footprint
from coalign.cluster.placement.nodes import find_accelerator
from coalign.cluster.worker import find_module_class
from coalign.config.schema import PARALLEL, ModelConfig, RunConfig
from coalign.config.yaml_reader import emit_inline
from coalign.launch.plan import prepare
from coalign_plan.checks.cluster_check import place_models
from coalign_plan.checks.memory_table import estimate_models, find_overload, list_loads
from coalign_plan.constants import Constants
from coalign_plan.gpus import ClusterSpec
from coalign_plan.layouts.adapter import PlannedRun, list_run_loads, pack_models
from coalign_plan.layouts.candidates import find_nearest
from coalign_plan.layouts.search import apply_run_settings, find_changes, search_layouts
from coalign_plan.memory import USABLE, read_shapes_of

# A backend's check of an architecture depends on these settings, beside the number of processes.
CUTS = (*PARALLEL, "compile", "fp8", "head", "load", "module")


class BackendRefusal:
    """Asks backends why they do not take a model's settings; keeps their answers on architectures."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.device = torch.device(find_accelerator(config.runtime.accelerator).device)
        self._answers: dict[tuple[Any, ...], str | None] = {}

    def list_cuts(self, name: str) -> Sequence[str]:
        """List the keys of PARALLEL that the backend of a model supports."""
        return find_module_class(self.config.models[name]).parallel

    def find_refusal(self, name: str, model: ModelConfig) -> str | None:
        """Return why the backend refuses a model's settings; None if it takes them."""
        module = find_module_class(model)
        try:
            model.check()
            find_footprint(name, model)
            module.check_settings(model, name, self.device)
        except ValueError as problem:
            return _shorten(problem)
        key = (name, model.processes, repr(model.megatron), *(getattr(model, cut) for cut in CUTS))
        if key not in self._answers:
            try:
                module.check_architecture(model, name)
                self._answers[key] = None
            except (ValueError, NotImplementedError) as problem:
                self._answers[key] = _shorten(problem)
        return self._answers[key]


def check_layout(
    load: Callable[[Mapping[str, Any]], RunConfig], settings: Mapping[str, Any], cluster: ClusterSpec
) -> str | None:
    """Return why a run with these settings would be refused on a cluster; None if it would be accepted."""
    try:
        plan = prepare(load(settings), devices=cluster.gpus)
        place_models(plan.started, plan.config, cluster)
        return find_overload(list_loads(plan, estimate_models(plan, cluster, read_shapes_of)), cluster)
    except (ValueError, ImportError) as problem:
        return _shorten(problem)


def offer_layout(run: PlannedRun, cluster: ClusterSpec) -> str:
    """Return, as the end of a sentence, the fewest settings with which a run fits on a cluster; empty if none do.

    Where the devices are too few for the configured groups, that is the best layout of a search.
    """
    backends, changes = BackendRefusal(run.config), dict[str, Any]()
    needed = sum({slot.name: slot.devices for slot in pack_models(run).values()}.values())
    if needed > cluster.gpus:
        layouts = search_layouts(
            run,
            cluster,
            Constants(),
            objective="seconds",
            supported=backends.list_cuts,
            refuse=backends.find_refusal,
            staleness=[run.config.runtime.max_staleness if run.generates else 0],
        ).layouts
        return _offer(find_changes(run.config, layouts[0].settings)) if layouts else ""
    for _ in run.started:  # each of them may not fit
        try:
            loads = list_run_loads(run, pack_models(run), cluster)
        except ValueError:
            return ""
        load = loads[0]
        if load.peak <= USABLE * cluster.memory_bytes:
            break
        model, name = run.models[load.turn], load.turn
        free = USABLE * cluster.memory_bytes - (load.peak - load.models[name].total)
        settings = find_nearest(run, model, cluster, free, backends.list_cuts(name), backends.find_refusal)
        if settings is None:
            return ""
        changes |= {f"models.{name}.{key}": value for key, value in settings.items()}
        run = run.with_config(apply_run_settings(run.config, changes))
    return _offer(changes)


def _offer(changes: Mapping[str, Any]) -> str:
    if not changes:
        return ""
    return "; the nearest layout that fits: " + " ".join(
        f"{key}={emit_inline(value)}" for key, value in changes.items()
    )


def _shorten(problem: Exception) -> str:
    """Return the first line of a problem, after the key of a Conflict."""
    key = getattr(problem, "key", ())
    text = getattr(problem, "message", None) or str(problem)
    return ": ".join([*([".".join(map(str, key))] if key else []), text.splitlines()[0]])
