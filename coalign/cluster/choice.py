"""Chooses the cluster that a configuration asks for, refuses what it cannot do, and places models on devices."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coalign.cluster.placement.slots import Footprint, Slot, pack_slots
from coalign.cluster.worker import find_module_class
from coalign.config.errors import ConfigError, ConfigProblem
from coalign.config.functions import is_bound_to_process
from coalign.config.schema import PARALLEL, ModelConfig, RunConfig

if TYPE_CHECKING:
    from coalign.cluster.cluster import Cluster
    from coalign.cluster.survivors.claim import RunClaim


def choose_cluster(config: RunConfig) -> str:
    """`local`, `ray` or `torchrun`; `auto` is torchrun in a process that it started, and Ray if it has an address or
    some model needs more than one process."""
    if config.runtime.cluster != "auto":
        return config.runtime.cluster
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun"
    models = config.models.values()
    several = any(model.processes > 1 for model in models)
    return "ray" if config.runtime.ray_address or several else "local"


def start_cluster(
    config: RunConfig, models: Mapping[str, ModelConfig] | None = None, claim: RunClaim | None = None
) -> Cluster:
    """Start the cluster that a configuration asks for, with devices for ``models`` (None: all of the configuration).

    Use it as a context manager. With a ``claim`` its processes on Ray outlive a driver that is killed, and those that
    the previous driver left are taken over. ValueError if the models do not fit on the cluster.
    """
    cluster_type = choose_cluster(config)
    if cluster_type == "local":
        from coalign.cluster.local import LocalCluster  # a subclass of Cluster, as the others

        return LocalCluster(config, models)
    if cluster_type == "torchrun":
        from coalign.cluster.torchrun import TorchrunCluster

        return TorchrunCluster(config, models)
    from coalign.cluster.ray.space import check_ray

    check_ray()
    from coalign.cluster.ray.ray_cluster import RayCluster  # the extra [ray] is needed only here

    return RayCluster(config, models, claim)


def check_cluster(config: RunConfig, syncs: Sequence[tuple[str, str]]) -> None:
    """Refuse what the processes of the cluster could not do. ImportError without a Ray that is needed.

    Other processes must be able to import all functions; those of torchrun cannot sample while others train.
    """
    if (cluster_type := choose_cluster(config)) == "local":
        return
    if cluster_type == "ray":
        from coalign.cluster.ray.space import check_ray

        check_ray()
    elif syncs:
        raise ValueError(
            f"runtime.cluster: `{config.algorithm}` samples from a model while another learns; torchrun's processes "
            "train one model on data (sft, dpo, reward_model, …), so start it with `coalign train`, on Ray"
        )
    for key, text in _texts(config.model_dump(), ""):
        if is_bound_to_process(text):
            raise ValueError(
                f"{key}: '{text}' is known to this process alone, and other processes call it; define it in a module "
                "that they can import, or set `runtime.cluster` to local"
            )


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) of all texts in a configuration."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _texts(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _texts(item, f"{key}[{index}]")


def plan_slots(models: Mapping[str, ModelConfig], colocation: Sequence[Sequence[str]]) -> dict[str, Slot]:
    """The slot of each model. ConfigError if models cannot be split or colocated as their settings say."""
    return pack_slots({name: find_footprint(name, model) for name, model in models.items()}, colocation)


def find_footprint(name: str, config: ModelConfig) -> Footprint:
    """Processes and devices of a model. ConfigError for a module that does not support its parallel settings."""
    for key in PARALLEL:
        if (ways := getattr(config, key)) > 1 and key not in find_module_class(config).parallel:
            inherited = f" (`like: {config.like}` takes it over)" if config.like else ""
            message = f"is {ways}, and the module `{config.module}` is not cut that way; set it to 1{inherited}"
            raise ConfigError([ConfigProblem(("models", name, key), message)])
    return Footprint.of(name, config, find_module_class(config).one_group(config))
