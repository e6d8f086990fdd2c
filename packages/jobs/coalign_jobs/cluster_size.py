"""Finds how many nodes a run needs, or checks that those which somebody asks for can hold it.

The recipe says which models run; their settings, and which of them share devices, say the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from coalign.cluster.choice import plan_slots
from coalign.cluster.placement.nodes import Node, assign_nodes
from coalign.cluster.placement.slots import Slot, list_slots
from coalign.config.errors import ConfigError, ConfigProblem
from coalign.config.schema import RunConfig
from coalign.launch.plan import find_shared_bases, outline_run

USUAL_DEVICES = 8  # a node has so many, if nobody says another number


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
        raise ConfigError([config.locations.on(ConfigProblem(("models", waiting[0], "num_gpu"), message))])
    slots = _find_slots(config)
    total = sum(slot.devices for slot in slots)
    if not total:
        return ClusterSize(nodes or 1, devices or 0, resource)
    per_node = devices if devices is not None else ceil(total / nodes) if nodes else min(total, USUAL_DEVICES)
    least = nodes or ceil(total / max(per_node, 1))
    largest = nodes or total
    for count in range(least, largest + 1):
        try:
            assign_nodes(slots, [Node(f"node {number}", per_node, per_node) for number in range(count)])
            return ClusterSize(count, per_node, resource)
        except ValueError as refusal:
            if count == largest or any(len(unit) > per_node for slot in slots for unit in _device_units(slot)):
                raise ValueError(f"{count} node(s) of {per_node} {resource}: {refusal}") from None
    raise AssertionError("the last number of nodes is tried or refused")


def _find_slots(config: RunConfig) -> list[Slot]:
    """Return the slots of the models that have devices. Reward functions need not be importable here."""
    roles = outline_run(config).roles
    judges = {reward.model for reward in config.reward}
    models = {name: model for name, model in config.models.items() if name in roles or name in judges}
    shared = find_shared_bases({name: role for name, role in roles.items() if name in models}, models)
    started = {name: model for name, model in models.items() if name not in shared}
    return [slot for slot in list_slots(plan_slots(started, config.runtime.colocation)) if slot.devices]


def _device_units(slot: Slot) -> list[list[int]]:
    """The devices of a slot that have to be on one node."""
    return [[position for position in unit if position < slot.devices] for unit in slot.units if unit[0] < slot.devices]
