"""The flow of a run, seen on stand-ins before anything loads: every call of a step, every column, every loss."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import cast

import torch

from coalign.algorithms.objective import Objective
from coalign.algorithms.segments import LossTotals
from coalign.backends.base import loss_input
from coalign.cluster.cluster import Cluster
from coalign.cluster.dry import STANDINS, DryCluster, FlowGraph, TracedCall
from coalign.cluster.future import Call
from coalign.config import ConfigError, locate_problems
from coalign.config.errors import ConfigProblem
from coalign.engine.hooks.guards import check_reported
from coalign.engine.reward import combine_rewards
from coalign.launch.plan import Plan, PlannedModel

# The outputs that a model with this head hands to its loss.
OUTPUTS = {"lm": ("logprobs",), "value": ("values",), "reward": ("scores",)}


def trace(plan: Plan) -> FlowGraph:
    """The calls of one step, from a run of the flows on stand-ins. ValueError for a column that nobody produces, a loss
    that cannot do with what it gets, or a guard on what the loss does not report."""
    with DryCluster(plan.config) as cluster:
        engine = plan.recipe(plan, cast(Cluster, cluster))  # it has the part of a cluster's interface that flows use
        make = STANDINS[plan.recipe.source]
        with engine.unfinished.roll_out():
            samples = engine.env_flow(cluster.put(make(), plan.recipe.source))
        engine.train_flow(cluster.resolve(samples))
        training = list(cluster.graph.calls)
        if plan.config.data.eval:
            engine.eval_flow(cluster.put(make(), plan.recipe.source))
        _check_sections(plan, engine.sections_read, [call.made_by for call in cluster.graph.calls])
    for call in training:
        model = plan.models.get(call.made_by.model or "")
        if model is not None and model.objective is not None and call.made_by.method == "train_step":
            reported = _try_loss(model, model.objective, call)
            if model is plan.learning[0]:
                check_reported(plan.config.runtime.guards, reported)
    return FlowGraph(training)


def _check_sections(plan: Plan, read: Collection[str], calls: Sequence[Call]) -> None:
    """Raise ConfigError for a section that was set, and that the flows ask for nowhere."""
    ways: dict[str, str] = {
        **dict.fromkeys(("advantage", "covariance", "truncated", "kl"), "`self.apply(self.advantage, batch)`"),
        "pairs": '`self.read_section("pairs")`',
    }
    unread = [name for name in ways if name not in read and _is_set(name, plan)]
    is_scored = "reward" in plan.recipe.evaluates or any(call.method == combine_rewards.__name__ for call in calls)
    if plan.config.reward and not is_scored:
        unread, ways["reward"] = [*unread, "reward"], "`self.reward.forward_step(batch)`"
    if unread:
        message = f"the flows of `{plan.config.algorithm}` never ask for it: call {{}} there, or leave the section out"
        with locate_problems(plan.config):
            raise ConfigError([ConfigProblem((name,), message.format(ways[name])) for name in unread])


def _is_set(name: str, plan: Plan) -> bool:
    """Whether a section is there and is not the recipe's default."""
    section, default = getattr(plan.config, name), plan.recipe.defaults.get(name)
    return section is not None and (default is None or section != type(section).model_validate(default))


def _try_loss(model: PlannedModel, objective: Objective, call: TracedCall) -> list[str]:
    """Run a model's loss on the stand-ins that its train_step receives; the names of the metrics it reports."""
    batch = call.batch
    assert batch is not None, "train_step takes a batch"
    trained = batch["loss_mask"]
    sizes = {"logprobs": int(trained.sum()), "values": int(trained.sum()), "scores": len(batch)}
    outputs = {output: torch.zeros(sizes[output], requires_grad=True) for output in OUTPUTS[model.config.head]}
    for measured in {"entropy", "collision"} & set(objective.needs):
        outputs[measured] = torch.zeros(sizes["logprobs"])
    if "candidate_logprobs" in objective.needs and "candidates" in batch:
        outputs["candidate_logprobs"] = torch.zeros(batch["candidates"][trained].shape)
    x = loss_input(batch, outputs)
    try:
        _, stats = objective(x, LossTotals(1.0, 1.0, 1.0))
    except (TypeError, AttributeError, ValueError) as problem:
        inputs = ("advantages", "old_values", "ref", "returns", "scores")
        missing = [name for name in inputs if getattr(x, name) is None]
        raise ValueError(
            f"models.{model.name}: the loss `{objective.name}` fails on what the flow gives it ({problem}); "
            f"of its inputs these are not there: {', '.join(missing)}"
        ) from problem
    return [f"loss/{stat}" for stat in stats]
