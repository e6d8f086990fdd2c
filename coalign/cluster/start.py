"""The cluster that a configuration asks for."""

from __future__ import annotations

from coalign.cluster.base import Cluster
from coalign.config.schema import RunConfig


def start(config: RunConfig) -> Cluster:
    """A running cluster (use it as a context manager). ValueError if the models can never fit on it.

    `auto` is Ray if it has an address or some model needs more than one process, and this process otherwise.
    """
    if kind(config) == "local":
        from coalign.cluster.local import LocalCluster

        return LocalCluster(config)
    from coalign.cluster.ray import RayCluster  # the extra [ray] is needed only here

    return RayCluster(config)


def kind(config: RunConfig) -> str:
    """`local` or `ray`."""
    if config.runtime.cluster != "auto":
        return config.runtime.cluster
    models = config.models.values()
    several = any((model.num_process or model.num_gpu) > 1 for model in models)
    return "ray" if config.runtime.ray_address or several else "local"
