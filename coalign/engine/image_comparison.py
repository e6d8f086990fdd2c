"""Compares engines that have classes of their own with their trainers, before a run with images samples anything."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

from coalign.backends.engines.image_probe import begin_probe, check_difference, sample_probe
from coalign.backends.engines.module import RolloutModule
from coalign.backends.pretrained import read_processor
from coalign.data.batch import Batch
from coalign.roles import Rollout

if TYPE_CHECKING:
    from coalign.engine.engine import Engine

log = logging.getLogger(__name__)


def compare_images(engine: Engine) -> None:
    """Let policies answer a prompt with two pictures, and their trainers score the answers, once weights were sent.

    ValueError for a policy whose log-probs differ by more than rounding.
    """
    for sync in engine.training.syncs:
        policy = engine.plan.models[sync.target.name]
        if policy.role is not Rollout or cast(type[RolloutModule], policy.module).compares_images:
            continue
        if (processor := read_processor(policy.config, engine.config.data.images)) is None:
            continue
        source, target = engine.running[sync.source.name], engine.running[sync.target.name]
        samples: Batch | None
        [samples, *_] = target.run(sample_probe, begin_probe(processor), parts=("weights", "kv")).result()
        if samples is None:
            log.warning("models.%s: two pictures do not fit, so its images were not compared", policy.name)
            continue
        scored = source.forward_step(engine.cluster.put(samples), into="ref_logprobs").result()
        expected = scored.fetch()["ref_logprobs"]
        check_difference(policy.name, [policy.config, source.config], samples, expected)
