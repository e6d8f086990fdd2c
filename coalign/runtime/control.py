"""From a configuration to the control over which groups a step trains on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from coalign.cluster.base import footprint
from coalign.config.schema import RunConfig
from coalign.data.batch import Batch
from coalign.data.loader import Loader
from coalign.runtime.budgets import with_budgets
from coalign.runtime.curriculum import Curriculum
from coalign.runtime.filtering import filter_function
from coalign.runtime.lengths import Lengths
from coalign.runtime.replay import Replay, replay_function

ROUNDS = 10  # roll-outs for one step without a filter, for each round that the longest response takes
CARRIED = 4  # weight versions that an unfinished group may be carried over at least: one that is cut takes its time


@dataclass(frozen=True)
class Control:
    """Which groups a step trains on. ``wanted``: how many (None: whatever one round gives). ``max_rounds``: roll-outs
    for one step, times ``rounds_of_a_response``, those that the longest response takes. ``max_age``: weight versions
    that the oldest token of a group may lag behind."""

    wanted: int | None = None
    max_rounds: int = 1
    rounds_of_a_response: int = 1
    max_age: int = 0
    keep: partial[Any] | None = None
    replay: Replay | None = None
    curriculum: Curriculum | None = None
    lengths: Lengths | None = None
    budget: Callable[[Batch], Batch] = lambda prompts: prompts  # adds what each prompt may cost, see budgets


def check_control(config: RunConfig) -> None:
    """Refuse (ValueError) a filter, a replay, a budget or a bound on age that cannot work."""
    if config.filter:
        filter_function(config.filter)
    if config.replay:
        replay_function(config.replay)
    budget, samples = config.rollout.group_tokens, config.runtime.samples_per_prompt
    if budget is not None and budget < samples:
        raise ValueError(
            f"rollout.group_tokens is {budget} and runtime.samples_per_prompt {samples}: each sample gets an "
            f"equal share of these tokens, and there is not one for each; make it {samples} or more"
        )
    staleness, age = config.runtime.max_staleness, config.rollout.max_age
    if age is not None and age < staleness:
        raise ValueError(
            f"rollout.max_age is {age} and runtime.max_staleness {staleness}: a batch may be begun {staleness} "
            f"versions ahead, so its tokens would be dropped for their age; make max_age {staleness} or more"
        )


def rounds_of_a_response(config: RunConfig) -> int:
    """Roll-outs that the longest response takes."""
    if config.rollout.round_tokens is None:
        return 1
    return math.ceil(config.models["policy"].sampling.max_new_tokens / config.rollout.round_tokens)


def replicas(config: RunConfig) -> int:
    """Replicas that generate side by side; 0 without a policy."""
    policy = config.models.get("policy")
    return 0 if policy is None else footprint("policy", policy).parts


def max_age(config: RunConfig) -> int:
    """Weight versions that the oldest token of a group may lag behind the step that trains on it."""
    if config.rollout.max_age is not None:
        return config.rollout.max_age
    carried = 0 if config.rollout.round_tokens is None else max(rounds_of_a_response(config) - 1, CARRIED)
    return config.runtime.max_staleness + carried


def control(config: RunConfig, cluster: Any, loader: Loader) -> Control:
    """A step takes a fixed number of groups where something decides which they are."""
    rollout = config.rollout
    decided = config.filter or rollout.oversample > 1 or rollout.round_tokens
    budgets = {}
    if rollout.samples_key or rollout.max_new_tokens_key or rollout.group_tokens:
        own = config.runtime.samples_per_prompt, config.models["policy"].sampling.max_new_tokens
        budgets["budget"] = partial(with_budgets, config=rollout, samples=own[0], max_new_tokens=own[1])
    return Control(
        wanted=config.runtime.prompts_per_step if decided else None,
        max_rounds=config.filter.max_rounds if config.filter else ROUNDS,
        rounds_of_a_response=rounds_of_a_response(config),
        max_age=max_age(config),
        keep=filter_function(config.filter) if config.filter else None,
        replay=Replay(cluster, config.replay) if config.replay else None,
        curriculum=Curriculum(config.curriculum, loader) if config.curriculum else None,
        lengths=Lengths() if replicas(config) > 1 else None,
        **budgets,
    )
