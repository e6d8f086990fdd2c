"""Compares the log-probs of users' generators with those of their trainers, before a run samples anything."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

from coalign.backends.engines.sampler_probe import begin_probe, check_difference, sample_probe
from coalign.backends.pretrained import read_config, read_processor
from coalign.data.batch import Batch

if TYPE_CHECKING:
    from coalign.engine.engine import Engine

log = logging.getLogger(__name__)


def compare_samplers(engine: Engine, policies: list[str]) -> None:
    """Have ``policies`` answer a prompt, and their trainers score the answers, after the first weight sync.

    In a run with images the prompt has two pictures. ValueError for a policy whose log-probs differ by more than
    rounding.
    """
    for sync in engine.training.syncs:
        if (name := sync.target.name) not in policies:
            continue
        config = engine.plan.models[name].config
        probe = begin_probe(read_config(config), read_processor(config, engine.config.data.images))
        source, target = engine.running[sync.source.name], engine.running[name]
        samples: Batch | None
        [samples, *_] = target.run(sample_probe, probe, components=("weights", "kv")).result()
        if samples is None:
            log.warning("models.%s: the prompt of its comparison does not fit, so it was not compared", name)
            continue
        scored = source.forward_step(engine.cluster.put(samples), into="ref_logprobs").result()
        expected = cast(Batch, scored.fetch())["ref_logprobs"]
        check_difference(name, [config, source.config], samples, expected)
