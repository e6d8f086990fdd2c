"""The driver at scale, in small: what benchmarks/driver.py measures works, and leaves nothing behind."""

from __future__ import annotations

import gc
import threading

import pytest

from benchmarks.driver import SAMPLES, engine_of, step
from coalign.cluster.batch_ref import BatchRef
from coalign.cluster.future import Future
from coalign.engine.hooks.timeline import Timeline


@pytest.fixture
def loop(tmp_path):
    """(engine, timeline) of 16 replicas of each model and 40 prompts a step."""
    engine, timeline = engine_of(16, 40 * SAMPLES), Timeline(tmp_path, every=0)
    engine.cluster.on_end = timeline.note
    yield engine, timeline
    engine.cluster.shutdown()


def alive():
    gc.collect()
    return sum(isinstance(thing, BatchRef | Future) for thing in gc.get_objects())


def test_every_process_takes_part_and_the_step_is_full(loop):
    engine, timeline = loop
    stats = step(engine, timeline)
    assert stats["filter/kept"].value == 40 and stats["filter/dropped"].value == 5  # of groups 0, 1, …, each tenth
    assert stats["rollout/rounds"].value == 3
    assert stats["train_step/0"].count == 40 * SAMPLES
    assert {f"idle/{name}" for name in ("policy", "reference", "reward", "trainer")} <= stats.keys()


def test_steps_leave_nothing_behind(loop):
    engine, timeline = loop
    for _ in range(3):
        step(engine, timeline)
    before, threads = alive(), threading.active_count()
    for _ in range(5):
        step(engine, timeline)
    assert engine.cluster.list_pending_calls() == []
    assert alive() <= before + 2  # the pool's rest may have one more piece
    assert threading.active_count() <= threads + 1  # that of a call that has just ended
    assert len(timeline._ended) < 40
