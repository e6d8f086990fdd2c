"""Places a run on a cluster that is not there: nodes, process groups and the memory of every device.

The placement is the code that a run uses (coalign.cluster.placement); only the nodes are simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from coalign.cluster.choice import plan_slots
from coalign.cluster.placement.nodes import Node, ProcessPlacement, assign_nodes, place_processes
from coalign.cluster.placement.slots import Slot, list_slots
from coalign.config.errors import ConfigError, ConfigProblem
from coalign.config.schema import ModelConfig, RunConfig
from coalign.launch.layout import describe_range
from coalign_plan.gpus import ClusterSpec
from coalign_plan.layouts.partition import ModelPartition, ModelRole, find_partition


@dataclass(frozen=True)
class SimulatedPlacement:
    """Where the processes of each model would be, by rank, on the nodes of a cluster."""

    cluster: ClusterSpec
    slots: Mapping[str, Slot]
    processes: Mapping[str, Sequence[ProcessPlacement]]

    @property
    def devices(self) -> int:
        return sum(slot.devices for slot in list_slots(self.slots))


def place_models(models: Mapping[str, ModelConfig], config: RunConfig, cluster: ClusterSpec) -> SimulatedPlacement:
    """Place models on simulated nodes. ConfigError if the nodes do not have the devices."""
    slots = plan_slots(models, config.runtime.colocation)
    gpus_per_node = cluster.gpus_per_node
    nodes = [Node(f"node {number}", gpus_per_node, gpus_per_node) for number in range(cluster.nodes)]
    try:
        assigned = assign_nodes(list_slots(slots), nodes)
    except ValueError as problem:
        first = next(name for name, model in models.items() if model.devices)
        message = f"on {cluster} {problem}"
        raise ConfigError([ConfigProblem(("models", first, "num_gpu"), message)]) from problem
    domains = [[[str(device) for device in range(gpus_per_node)]] for _ in nodes]
    return SimulatedPlacement(cluster, slots, place_processes(list_slots(slots), assigned, domains))


def describe_groups(
    placement: SimulatedPlacement, models: Mapping[str, ModelConfig], roles: Mapping[str, ModelRole]
) -> Table:
    """Describe on which nodes each model would be, and which process groups it would form."""
    cluster = placement.cluster
    table = Table(box=None, pad_edge=False, title_justify="left")
    table.title = (
        f"on {cluster}: {placement.devices:,} of {cluster.gpus:,} devices ({cluster.gpu.memory_gib:g} GiB each)"
    )
    for column in ("model", "nodes", "groups"):
        table.add_column(column)
    for name, processes in placement.processes.items():
        if not models[name].devices:
            continue
        nodes = sorted({process.node for process in processes})
        partition = find_partition(models[name], roles[name])
        table.add_row(name, describe_range(nodes), " · ".join(_list_groups(partition, processes)))
    return table


def _list_groups(partition: ModelPartition, processes: Sequence[ProcessPlacement]) -> Iterator[str]:
    """Yield a text for each type of process group: its size, how many there are, and the nodes that one spans."""
    nodes = [process.node for process in processes for _ in process.devices]
    ranks, stage = len(nodes), len(nodes) // partition.pipeline
    row = partition.tensor * partition.context
    if len(processes) < ranks or not (partition.stores or row * partition.pipeline * partition.expert > 1):
        size = ranks // len(processes)
        spans = max(len(set(nodes[start : start + size])) for start in range(0, ranks, size))
        over = f" on {spans} nodes each" if spans > 1 else ""
        cut = f" of TP {partition.tensor}" + (f" × PP {partition.pipeline}" if partition.pipeline > 1 else "")
        yield f"{len(processes)} replicas" + (f"{cut}{over}" if size > 1 else " of 1 GPU")
        return
    groups = {
        "TP": (lambda rank: rank // partition.tensor, partition.tensor),
        "CP": (lambda rank: (rank // row, rank % partition.tensor), partition.context),
        "PP": (lambda rank: rank % stage, partition.pipeline),
        "EP": (
            lambda rank: (
                rank // stage,
                rank % stage // (partition.expert * partition.expert_tensor),
                rank % partition.expert_tensor,
            ),
            partition.expert,
        ),
        "DP": (lambda rank: (rank // stage, rank % row), partition.data),
    }
    for name, (find_group, size) in groups.items():
        if size == 1 and not (name == "DP" and ranks == 1):
            continue
        members: dict[object, set[int]] = {}
        for rank, node in enumerate(nodes):
            members.setdefault(find_group(rank), set()).add(node)
        spans = max(map(len, members.values()))
        yield f"{name} {size}" + (f" over {spans} nodes" if spans > 1 else " in a node" if name != "DP" else "")
    if partition.stores:
        kept = ", ".join(partition.stores)
        shards = partition.shards(partition.stores[0])
        yield f"{kept} sharded over {shards}" if shards > 1 else f"{kept} whole"
