"""`coalign check`: configuration, flow, losses and memory of a run, seen before anything loads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.table import Table

from coalign.algorithms.aggregate import Totals
from coalign.cluster.base import planned
from coalign.cluster.dry import Call, DryCluster, Graph, draw_graph
from coalign.cluster.placement.devices import accelerator
from coalign.cluster.placement.slots import distinct
from coalign.cluster.residency import movable
from coalign.cluster.standins import STANDINS
from coalign.cluster.worker import module_class
from coalign.config import locate_problems
from coalign.config.functions import resolve_class
from coalign.config.schema import ModelConfig, RunConfig
from coalign.engine.engine import Engine
from coalign.engine.hooks.guards import check_reported
from coalign.engine.reward import composition
from coalign.launch.build import context, models_with_processes, prepare, requested_layout, roles_of, spawn
from coalign.launch.memory_estimate import Estimate, estimate, largest_phase
from coalign.launch.validate import is_trained_by_loss, loss_of
from coalign.report.display import Display
from coalign.types import LossInput

# What a model with this head hands to its loss.
OUTPUTS = {"lm": ("logprobs",), "value": ("values",), "reward": ("scores",)}


def check(config: RunConfig, display: Display) -> None:
    """Print what the run would do. Raises ValueError for whatever would stop it."""
    cls, models = prepare(config)
    graph = trace(cls, models, config)
    count = f"{len(models)} models" if len(models) > 1 else "1 model"
    display.show(f"{config.algorithm}: {count}, {config.runtime.steps or f'{config.runtime.epochs} epochs of'} steps\n")
    display.show(draw_graph(graph) + "\n")
    with locate_problems(config):
        _try_backends(models, config)
        notes = [f"{name}: {note}" for name, model in models.items() for note in _notes(model)]
    if rewards := composition(models, config):
        display.show(rewards + "\n")
    with locate_problems(config):
        display.show(requested_layout(models_with_processes(cls, models, config), config))
    display.show("")
    display.show(_memory(cls, models, config))
    for line in [*_sharing(cls, models, config), *notes]:
        display.show(line)
    display.show("\nno problem found")


def trace(cls: type[Engine], models: Mapping[str, ModelConfig], config: RunConfig) -> Graph:
    """The calls of one step, from a run of the flows on stand-ins. ValueError for a column that nobody produces, a loss
    that cannot do with what it gets, or a guard on what the loss does not report."""
    with DryCluster(config) as cluster:
        engine = cls(config, cluster)
        spawn(engine, models, {name: context(name, model, config, steps=1) for name, model in models.items()})
        make = STANDINS[cls.source]
        engine.train_flow(cluster.resolve(engine.env_flow(cluster.put(make(), cls.source))))
        training = list(cluster.graph.calls)
        if config.data.eval:
            engine.eval_flow(cluster.put(make(), cls.source))
    for call in training:
        name, _, method = call.label.partition("#")[0].partition(".")
        if method == "train_step" and is_trained_by_loss(models[name]):
            reported = _try_loss(name, models[name], config, call)
            if name == engine.learning[0]:
                check_reported(config.runtime.guards, reported)
    return Graph(training)


def _try_loss(name: str, model: ModelConfig, config: RunConfig, call: Call) -> list[str]:
    """Run a model's loss on the stand-ins that its train_step receives; the names of the metrics it reports."""
    from coalign.backends.objective import Objective, loss_input

    loss, _ = loss_of(name, model, config)
    trained = call.batch["loss_mask"]
    sizes = {"logprobs": int(trained.sum()), "values": int(trained.sum()), "scores": len(call.batch)}
    outputs = {output: torch.zeros(sizes[output], requires_grad=True) for output in OUTPUTS[model.head]}
    objective = Objective(**loss.model_dump())
    for measured in {"entropy", "collision"} & set(objective.needs):
        outputs[measured] = torch.zeros(sizes["logprobs"])
    if "candidate_logprobs" in objective.needs and "candidates" in call.batch:
        outputs["candidate_logprobs"] = torch.zeros(call.batch["candidates"][trained].shape)
    have: LossInput = loss_input(call.batch, outputs)
    try:
        _, stats = objective(call.batch, outputs, Totals(1.0, 1.0, 1.0))
    except (TypeError, AttributeError, ValueError) as problem:
        missing = sorted(
            f for f in ("ref", "advantages", "returns", "old_values", "scores") if getattr(have, f) is None
        )
        raise ValueError(
            f"models.{name}: the loss `{loss.fn}` fails on what the flow gives it ({problem}); "
            f"of its inputs these are not there: {', '.join(missing)}"
        ) from problem
    return [f"loss/{stat}" for stat in stats]


def _try_backends(models: Mapping[str, ModelConfig], config: RunConfig) -> None:
    """Raise what the setup of each model would raise before it reads weights."""
    for name, model in models.items():
        device = torch.device(accelerator(config.runtime.accelerator).device if model.num_gpu else "cpu")
        # A cache, or a template to read by, and the backend behind it.
        for module in dict.fromkeys((module_class(model), resolve_class(model.module, "coalign.backends"))):
            module.check_settings(model, name, device)
            if model.load:
                _try_architecture(module, model, name)
            if _runs_here(device, config):
                module.check_machine(model, name, device)


def _try_architecture(module: type, model: ModelConfig, name: str) -> None:
    try:
        module.check_architecture(model, name)
    except (ValueError, NotImplementedError) as problem:
        if str(problem).startswith(f"models.{name}"):
            raise
        raise ValueError(f"models.{name}.load: {problem}") from problem


def _runs_here(device: torch.device, config: RunConfig) -> bool:
    """Whether this machine is one of those that compute, as far as it is known before the run starts."""
    return not config.runtime.ray_address and (device.type == "cpu" or torch.cuda.is_available())


def _notes(model: ModelConfig) -> Sequence[str]:
    return module_class(model).notes(model) if model.load else ()


def _memory(cls: type[Engine], models: Mapping[str, ModelConfig], config: RunConfig) -> Any:
    table = Table(box=None, pad_edge=False, title="memory, over all processes of a model", title_justify="left")
    for column in ("model", "size", "weights", "gradients", "optimizer", "activations", "KV", "total"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, role in roles_of(cls, config).items():
        if models[name].load is None:
            continue
        e: Estimate = estimate(models[name], role, config)
        parts = (e.weights, e.gradients, e.optimizer, e.activations, e.cache, e.total)
        table.add_row(name, f"{e.parameters / 1e6:,.1f}M", *map(_size, parts))
    return table


def _sharing(cls: type[Engine], models: Mapping[str, ModelConfig], config: RunConfig) -> Iterator[str]:
    """What models that share devices take of each, and whether that is there."""
    roles, slots = roles_of(cls, config), planned(models, config.runtime.colocation)
    for slot in (slot for slot in distinct(slots) if len(slot.places) > 1):
        sizes = {name: _per_place(models[name], roles[name], config) for name in slot.places if models[name].load}
        if not sizes:
            continue
        leaves = {name: movable(models[name], slot.footprints[name].devices, colocated=True) for name in sizes}
        turns, together = largest_phase(sizes, leaves), largest_phase(sizes, {})
        text = f"{slot.name} on each device: {_size(turns)} at most"
        yield f"{text} ({_size(together)} if nothing left it)" if turns < together else text
        memory = config.runtime.device_memory
        if memory is not None and turns > memory * 2**30:
            yield f"  more than runtime.device_memory ({memory:g} GiB)"


def _per_place(model: ModelConfig, role: type, config: RunConfig) -> Estimate:
    """The share of a model that one device has: of a group of processes a part, of a replica all of it."""
    shared = module_class(model).one_group(model)
    shards = model.processes // model.dp_replicate if shared else model.tensor_parallel
    whole = asdict(estimate(model, role, config))
    return Estimate(**{name: number // shards for name, number in whole.items()})


def _size(number: int) -> str:
    return f"{number / 2**30:,.1f} GiB" if number >= 2**30 else f"{number / 2**20:,.0f} MiB"
