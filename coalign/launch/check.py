"""`coalign check`: configuration, flow, losses and memory of a run, seen before anything loads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from coalign.backends.base import Module
from coalign.cluster.dry import describe_graph, draw_graph
from coalign.cluster.placement.nodes import find_accelerator
from coalign.companions import CHECKS, ask, name_missing
from coalign.config import locate_problems
from coalign.config.errors import located_at
from coalign.config.functions import resolve_class
from coalign.config.schema import ModelConfig, RunConfig
from coalign.devices import count_devices
from coalign.engine.hooks.run_folder import check_folders
from coalign.engine.reward import describe_reward, list_reward_facts
from coalign.files import read_model_config
from coalign.hub import find_directory, is_hub_name
from coalign.launch.data_load import check_lengths
from coalign.launch.device_plan import check_devices
from coalign.launch.fetch import fetch_sources
from coalign.launch.layout import describe_requested_layout
from coalign.launch.plan import Plan, PlannedModel, describe_models, prepare
from coalign.launch.trace import trace
from coalign.report.display import Display
from coalign.weights.model_files import check_adapter_files, has_weights

if TYPE_CHECKING:
    from rich.console import RenderableType


class _SimulatedCluster(Protocol):
    """A cluster that need not be there, as coalign-plan describes it."""

    @property
    def gpus(self) -> int: ...


@dataclass(frozen=True)
class RowLengths:
    """Tokens of the longest sequence, and of the row with the most in all of its sequences."""

    sequence: int
    row: int


@dataclass
class DataFindings:
    """Lines that describe the data, and warnings. ``lengths`` of the training rows, if all sources were read.

    ``sources``: the facts about each source that was read, for JSON.
    """

    lines: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    sources: list[dict[str, Any]] = field(default_factory=list)
    lengths: RowLengths | None = None


@dataclass
class CheckReport:
    """What `coalign check` reports: shown while it goes on, and kept as ``facts`` for `--json`."""

    display: Display
    facts: dict[str, Any]

    def add(self, *shown: RenderableType, **facts: Any) -> None:
        """Show texts and tables, and keep facts (what JSON can hold) by name."""
        self.facts |= facts
        for content in shown:
            self.display.show(content)


def check(
    config: RunConfig, display: Display, cluster: _SimulatedCluster | None = None, facts: dict[str, Any] | None = None
) -> None:
    """Print what the run would do. Raises ValueError for whatever would stop it.

    It fetches configurations and tokenizers of models of the hub, no weights, and the names of the files of its data.
    It reads the first rows of files that are here. With ``cluster`` the run is placed on that one, which need not be
    there, and refused if a device would not hold its models. ``facts`` is filled with what is printed, for JSON.
    """
    report = CheckReport(display, {} if facts is None else facts)
    fetched = fetch_sources(config, weights=False, rows=False)
    plan = prepare(fetched, devices=cluster.gpus) if cluster else prepare(fetched)
    _report_flow(report, plan)
    planned = [model for model in plan.models.values() if _is_planned(model.config.load)]
    present = [model for model in plan.models.values() if model not in planned]
    with locate_problems(plan.config):
        notes = _check_models(plan, present, simulated=cluster is not None)
        data = _check_data(plan, present, simulated=cluster is not None)
    report.add("\n".join([*data.lines, ""]), data=data.sources, warnings=data.warnings)
    if rewards := describe_reward(plan.rewards, plan.configs):
        report.add(rewards + "\n", reward=list_reward_facts(plan.rewards))
    _report_placement(report, plan, fetched, cluster)
    excess = ""
    if planned:
        report.add(*_describe_planned(planned))
    elif (fit := ask(CHECKS, "memory", report, plan, fetched, cluster, data.lengths)) is not None:
        remarks, excess = fit
        notes = [*remarks, *notes]
    else:
        notes = [*notes, f"memory: not estimated; pip install {name_missing(CHECKS, 'memory')}"]
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
    _check_directories(present)
    check_folders(config)
    check_lengths(plan, present)
    for model in present:
        _check_backend(model, config, simulated=simulated)
    _check_weights(present, simulated=simulated)
    loaded = [model for model in present if model.config.load]
    return [f"{model.name}: {note}" for model in loaded for note in model.module.notes(model.config)]


def _check_data(plan: Plan, present: Sequence[PlannedModel], *, simulated: bool) -> DataFindings:
    """Read the first rows of the data, as coalign-prepare does. ConfigError for what would end the run."""
    findings = ask(CHECKS, "data", plan, present, simulated)
    return findings or DataFindings([f"data: not read; pip install {name_missing(CHECKS, 'data')}"])


def _report_placement(report: CheckReport, plan: Plan, fetched: RunConfig, cluster: _SimulatedCluster | None) -> None:
    """Add where the models compute. ConfigError for devices that are not there."""
    with locate_problems(plan.config):
        report.add(describe_requested_layout(plan.started, plan.config), models=describe_models(plan))
        if plan.devices:
            report.add(plan.devices)
        if cluster is None:
            check_devices(plan.started, plan.config)
        else:
            ask(CHECKS, "placement", report, plan, fetched, cluster)
    report.add("")


def _describe_planned(models: Sequence[PlannedModel]) -> Iterator[str]:
    """Yield which models are not there yet."""
    for load in dict.fromkeys(model.config.load for model in models):
        names = ", ".join(model.name for model in models if model.config.load == load)
        yield (
            f"{names}: {load} is not there yet, a run with `output: {Path(str(load)).parent}` makes it; its "
            "backend and memory are not checked"
        )


def _is_planned(load: str | None) -> bool:
    """Whether `load` names the directory of a model that another run will make."""
    return load is not None and not is_hub_name(load) and not Path(load).exists()


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


def _check_directories(models: Iterable[PlannedModel]) -> None:
    """Refuse directories in which there is no model, or one of another format or of an unknown architecture."""
    from coalign.backends.known_models import find_known_model
    from coalign.backends.pretrained import check_architecture

    for model in models:
        if model.config.load:
            with located_at("models", model.name, "load"):
                directory = find_directory(model.config.load)
                read_model_config(directory)
                if find_known_model(model.config) is None:
                    check_architecture(directory)


def _check_weights(models: Iterable[PlannedModel], *, simulated: bool = False) -> None:
    """Refuse weights that no model of this architecture and head has. Their headers are read, and no values.

    Those that are not fetched yet are not compared, nor those of a run on another cluster (``simulated``) that are not
    here.
    """
    from coalign.backends import pretrained

    seen = set()
    for model in models:
        config = model.config
        if not config.load or config.init == "random" or ":" in config.module:
            continue
        is_local = Path(config.load).is_dir() and not simulated
        with located_at("models", model.name, "load"):
            if is_local or has_weights(find_directory(config.load)):
                subject = (config.load, config.head, config.head_init, config.frozen, config.vision is None)
                if subject not in seen:
                    pretrained.check_weights(config)
                seen.add(subject)
        if config.lora and config.lora.load and (is_local or Path(config.lora.load).is_dir()):
            with located_at("models", model.name, "lora", "load"):
                check_adapter_files(find_directory(config.lora.load))
