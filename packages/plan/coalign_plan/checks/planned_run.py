"""Describes a run for the planner: the roles of its models, which of them share weights, how many devices each has."""

from __future__ import annotations

from coalign.config.errors import ConfigError, ConfigProblem
from coalign.config.schema import RunConfig
from coalign.launch.device_plan import assign_devices
from coalign.launch.plan import find_shared_bases, outline_run
from coalign_plan.checks.memory_table import find_role
from coalign_plan.gpus import ClusterSpec
from coalign_plan.job import LengthDistribution
from coalign_plan.layouts.adapter import PlannedRun, read_run


def describe_run(
    config: RunConfig, cluster: ClusterSpec, lengths: LengthDistribution | None = None, devices: int | None = None
) -> PlannedRun:
    """Describe a run on a cluster. Backends are imported only where `num_gpu: auto` is to become a number.

    ``devices``: what `auto` may use, if not all of the cluster (0: the cluster is a CPU).

    ConfigError for a run without weights, and for a model whose config.json does not say how large it is.
    """
    outline = outline_run(config)
    listed = outline.list_models(config)
    roles = {name: role for name, (role, _) in listed.items()}
    configs = {name: model for name, (_, model) in listed.items()}
    config = config.model_copy(update={"models": config.models | configs})
    if any(model.num_gpu == "auto" and model.load for model in configs.values()):
        config = assign_devices(config, [*roles], devices=cluster.gpus if devices is None else devices)
    bases = find_shared_bases(roles, config.models)
    run = read_run(
        config, {name: find_role(role) for name, role in roles.items()}, outline.recipe.source, bases, lengths
    )
    if not run.models:
        message = "no model of this run has weights, so there is nothing to plan"
        raise ConfigError([ConfigProblem(("models",), message)])
    return run
