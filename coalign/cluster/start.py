"""The cluster that a configuration asks for."""

from __future__ import annotations

from collections.abc import Mapping

from coalign.cluster.base import Cluster
from coalign.config.schema import ModelConfig, RunConfig


def start(config: RunConfig, models: Mapping[str, ModelConfig] | None = None) -> Cluster:
    """A running cluster (use it as a context manager) with room for ``models`` (None: all of the configuration).
    ValueError if they do not fit on it.

    `auto` is Ray if it has an address or some model needs more than one process, and this process otherwise.
    """
    if kind(config) == "local":
        from coalign.cluster.local import LocalCluster

        return LocalCluster(config, models)
    from coalign.cluster.ray import RayCluster  # the extra [ray] is needed only here

    return RayCluster(config, models)


def kind(config: RunConfig) -> str:
    """`local` or `ray`."""
    if config.runtime.cluster != "auto":
        return config.runtime.cluster
    models = config.models.values()
    several = any((model.num_process or model.num_gpu) > 1 for model in models)
    return "ray" if config.runtime.ray_address or several else "local"
