"""How long a row of a run may be: what its models read at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from coalign.data.limits import RowLimit
from coalign.launch.plan import Plan, PlannedModel
from coalign.launch.validate import find_token_limit
from coalign.roles import Rollout


def find_row_limits(plan: Plan, models: Iterable[PlannedModel]) -> list[RowLimit]:
    """Find what ``models``, whose directories are there, take of a row of the plan's data.

    Policies read prompts, and need room for a token of the response; trainers and scorers read whole rows of data.
    """
    if plan.recipe.source != "prompts":
        return [limit for model in models if model.role is not Rollout for limit in list_limits(model)]
    policies = [m for m in models if m.role is Rollout and m.config.load]
    readers = {m.name: limit for m in plan.models.values() if (limit := find_token_limit(m, plan.compared)) is not None}
    key = "models.{}.max_tokens_per_micro, for prompt and response"
    return [
        *(limit for policy in policies for limit in policy.module.list_limits(policy.config, f"models.{policy.name}")),
        *(RowLimit(limit - 1, key.format(name)) for name, limit in readers.items()),
    ]


def list_limits(model: PlannedModel) -> Iterator[RowLimit]:
    """Yield what a model takes of rows of data: of a sequence, and of those that its loss compares in one micro-batch.

    A model that reads text cuts it, so it has no limit.
    """
    from coalign.backends.pretrained import read_config, read_context_length  # imports transformers

    config = model.config
    if not config.load or config.chat_template or config.judge:
        return
    for limit in model.module.list_limits(config, f"models.{model.name}"):
        yield limit
        if limit.scope == "sequence" and model.objective is not None and model.objective.per == "group":
            yield replace(limit, scope="row")
    if (context := read_context_length(read_config(config))) is not None:
        yield RowLimit(context, f"max_position_embeddings of models.{model.name}")
