"""Finds how many nodes a run needs, or checks that those which somebody asks for can hold it.

Nothing is imported for it that computes: the settings of the models, and which of them share devices, say enough. The
recipe is asked, which imports torch, only where the number of devices depends on what it alone knows: recipes and
losses of somebody's own, and adapters, whose base may stand in for a reference.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from coalign.cluster.placement.nodes import Node, assign_nodes
from coalign.cluster.placement.slots import Footprint, Slot, list_slots, pack_slots
from coalign.config.errors import ConfigError, ConfigProblem
from coalign.config.schema import RunConfig
from coalign.jobs.declarations import forms_group, reads_reference

USUAL_DEVICES = 8  # of a node, if nobody says how many it has
OPTIONAL = "reference"  # the model that a recipe leaves out if no loss reads its log-probs


@dataclass(frozen=True)
class ClusterSize:
    """Nodes that are alike, the devices of each, and Ray's name of these."""

    nodes: int
    devices: int
    resource: str


def size_cluster(config: RunConfig, nodes: int | None = None, devices: int | None = None) -> ClusterSize:
    """Find the smallest cluster that holds the run; ``nodes`` and ``devices`` of each are kept where they are given.

    Raises ConfigError or ValueError if they cannot hold it, and if `num_gpu: auto` leaves open how many there are.
    """
    resource = config.runtime.accelerator
    waiting = [name for name, model in config.models.items() if model.num_gpu == "auto" and not model.num_process]
    if waiting and devices is None:
        message = (
            "is auto, so every device counts that is there: say how many with --nodes and --gpus-per-node "
            "(`--gpus-per-node 0`: compute on the CPU), or give a number here"
        )
        raise ConfigError([config.places.on(ConfigProblem(("models", waiting[0], "num_gpu"), message))])
    slots = _find_slots(config)
    total = sum(slot.devices for slot in slots)
    if not total:
        return ClusterSize(nodes or 1, devices or 0, resource)
    each = devices if devices is not None else ceil(total / nodes) if nodes else min(total, USUAL_DEVICES)
    least = nodes or ceil(total / max(each, 1))
    most = nodes or total
    for count in range(least, most + 1):
        try:
            assign_nodes(slots, [Node(f"node {number}", each, each) for number in range(count)])
            return ClusterSize(count, each, resource)
        except ValueError as refusal:
            if count == most or any(len(unit) > each for slot in slots for unit in _device_units(slot)):
                raise ValueError(f"{count} node(s) of {each} {resource}: {refusal}") from None
    raise AssertionError("the last number of nodes is tried or refused")


def _find_slots(config: RunConfig) -> list[Slot]:
    """Find the slots of the models that run."""
    everything, others = config.models, [name for name in config.models if name != OPTIONAL]
    if ":" in config.algorithm:
        return _pack(config, _list_started(config))
    with_all, without = _pack(config, everything), _pack(config, others)
    if sorted(map(_device_units, with_all)) == sorted(map(_device_units, without)):
        return with_all
    runs = _runs_reference(config)
    return _pack(config, _list_started(config)) if runs is None else with_all if runs else without


def _runs_reference(config: RunConfig) -> bool | None:
    """Whether a recipe of Coalign starts the reference: something charges for the divergence from it. None: ask it."""
    if config.loss is None or any(model.lora for model in config.models.values()):
        return None
    charged = config.kl is not None and config.kl.arguments.get("coef") != 0
    return charged or reads_reference(config.loss.fn, config.loss.arguments)


def _pack(config: RunConfig, names: Iterable[str]) -> list[Slot]:
    models = {name: config.models[name] for name in names}
    footprints = {name: Footprint.of(name, model, forms_group(model.module)) for name, model in models.items()}
    return [slot for slot in list_slots(pack_slots(footprints, config.runtime.colocation)) if slot.devices]


def _device_units(slot: Slot) -> list[list[int]]:
    """The devices of a slot that have to be on one node."""
    return [[place for place in unit if place < slot.devices] for unit in slot.units if unit[0] < slot.devices]


def _list_started(config: RunConfig) -> list[str]:
    """List the models that get processes of their own, as the recipe says."""
    from coalign.backends.base import Objective  # these import torch
    from coalign.launch.plan import find_recipe, find_shared_bases

    loss = Objective.of(config.loss, "loss") if config.loss else None
    roles = find_recipe(config.algorithm).roles(config, loss)
    judges = {reward.model for reward in config.reward}
    named = {name: model for name, model in config.models.items() if name in roles or name in judges}
    shared = find_shared_bases({name: role for name, role in roles.items() if name in named}, named)
    return [name for name in named if name not in shared]
