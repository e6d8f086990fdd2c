"""The devices of models that do not say how many they take (`num_gpu: auto`), and devices that are not there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from coalign.cluster.choice import choose_cluster, plan_slots
from coalign.cluster.placement.nodes import ACCELERATORS, Node, assign_nodes, find_accelerator
from coalign.cluster.placement.slots import list_slots
from coalign.cluster.worker import find_module_class
from coalign.config.errors import ConfigError, ConfigProblem, Conflict, located_at
from coalign.config.schema import ModelConfig, RunConfig
from coalign.devices import count_devices


def assign_devices(
    config: RunConfig, names: Sequence[str], *, join: bool = True, devices: int | None = None
) -> RunConfig:
    """Replace `num_gpu: auto` by numbers, and let models share devices where the configuration does not say which.

    The models called ``names`` share all devices that are there and that no model asks for by number. In one process
    (`runtime.cluster: local`, or Ray is not installed) each gets one device, or all share one if there are too few.
    With `runtime.colocation` each group, and each model in none, gets the same number. All other models get none.
    ConfigError if no device is left. Without ``join`` a Ray cluster is not asked, and counts as one without devices.
    ``devices``: how many a cluster has that is not there, instead of this machine.
    """
    models, runtime = config.models, config.runtime
    with located_at("runtime", "accelerator"):
        find_accelerator(runtime.accelerator)
    waiting = {name for name in names if name in models and _waits(name, models[name])}
    total = (_count(config, join) if devices is None else devices) if waiting else 0
    grouped = {name for group in runtime.colocation for name in group}
    alone = [name for name in names if name in waiting - grouped]
    taken = [[name] for name in names if name in models and models[name].devices and name not in grouped]
    free = total - _size(taken, models) - _size(runtime.colocation, models)
    ray = runtime.ray_address or devices is not None or find_spec("ray") is not None
    in_one_process = runtime.cluster == "local" or not ray
    apart = bool(runtime.colocation) or len(alone) < 2 or (in_one_process and free >= len(alone))
    new = [[name] for name in alone] if apart else [alone]
    sharing = [group for group in [*runtime.colocation, *new] if waiting & {*group} and not _size([group], models)]
    per_group = max(free, 0) // len(sharing) if sharing else 0
    if total and sharing and not per_group:
        message = (
            f"is auto, and of {total} other models leave none for it. Give a number (0: CPU), or let it share devices "
            "with runtime.colocation"
        )
        first = next(name for name in sharing[0] if name in waiting)
        raise ConfigError([ConfigProblem(("models", first, "num_gpu"), message)])
    per_group = min(per_group, 1) if in_one_process else per_group
    numbers = {}
    for group in [*runtime.colocation, *new]:
        numbers |= {name: _size([group], models) or per_group for name in group if name in waiting}
    assigned = {
        name: model.model_copy(update={"num_gpu": numbers.get(name, 0)}) if model.num_gpu == "auto" else model
        for name, model in models.items()
    }
    for name, model in assigned.items():
        try:
            model.check()  # what the schema could not know
        except Conflict as conflict:
            raise ConfigError([ConfigProblem(("models", name, *conflict.key), conflict.message)]) from conflict
    shared = [] if apart or not per_group else new
    runtime = runtime.model_copy(update={"colocation": [*runtime.colocation, *shared]})
    return config.model_copy(update={"models": assigned, "runtime": runtime})


def describe_devices(requested: RunConfig, assigned: RunConfig) -> str:
    """Describe in one line which devices `auto` stands for; empty if it stands for none."""
    accelerator, by_number = assigned.runtime.accelerator, dict[int, list[str]]()
    for name, model in assigned.models.items():
        if model.devices and requested.models[name].num_gpu == "auto":
            by_number.setdefault(model.devices, []).append(name)
    turns = " in turn" if assigned.runtime.colocation else ""
    shares = [f"{', '.join(names)}: {n} {accelerator}{'s' * (n > 1)}{turns}" for n, names in by_number.items()]
    return f"num_gpu is auto; {'; '.join(shares)}" if shares else ""


def check_devices(models: Mapping[str, ModelConfig], config: RunConfig) -> None:
    """Refuse devices that this machine does not have. Those of a running Ray cluster are known when it is joined."""
    resource = config.runtime.accelerator
    asking = [name for name, model in models.items() if model.devices]
    if not asking or config.runtime.ray_address or resource not in ACCELERATORS:
        return
    if not (there := count_devices(find_accelerator(resource).device)):
        message = (
            f"is {models[asking[0]].devices}, and torch finds no {resource} on this machine; 0 computes on the CPU, "
            "and runtime.ray_address names a Ray cluster that has them"
        )
        raise ConfigError([ConfigProblem(("models", asking[0], "num_gpu"), message)])
    if choose_cluster(config) == "torchrun":
        return  # its processes may be on several machines; models of one share its device
    with located_at("models", asking[0], "num_gpu"):
        slots = list_slots(plan_slots(models, config.runtime.colocation))
        assign_nodes(slots, [Node("this machine", there, there)])


def _waits(name: str, model: ModelConfig) -> bool:
    """Whether a model's number is to be found: it computes, and it is not cut into processes of the CPU."""
    with located_at("models", name, "module"):
        return (
            model.num_gpu == "auto"
            and bool(model.load)
            and not model.num_process
            and find_module_class(model).exclusive
        )


def _size(groups: Sequence[Sequence[str]], models: Mapping[str, ModelConfig]) -> int:
    """Devices of groups whose members share them."""
    return sum(max(models[name].devices for name in group) for group in groups if group)


def _count(config: RunConfig, join: bool) -> int:
    """Count the devices that a run may use, on this machine or of the Ray cluster that it joins."""
    runtime = config.runtime
    device = find_accelerator(runtime.accelerator).device
    if device == "cpu":
        return 0  # simulated: they are as many as somebody asks for
    if runtime.ray_address:
        if not join:
            return 0
        from coalign.cluster.ray.space import check_ray

        check_ray()
        from coalign.cluster.ray.connection import count_cluster_devices  # the extra [ray] is needed only here

        return count_cluster_devices(runtime.ray_address, runtime.accelerator)
    return count_devices(device)
