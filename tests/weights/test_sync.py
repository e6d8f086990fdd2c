"""Weights from one model to another: live in one process, through the object store on Ray, never damaged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from coalign.cluster.future import WorkerError
from coalign.types import Total
from coalign.weights.buckets import WeightError
from coalign.weights.object_store import through_store
from coalign.weights.sync import WeightSync

SERVED = {"model.frozen": [0.0] * 4, "model.weight": [3.0] * 4, "model.half": [3.0] * 4}
MODELS = {"trainer": {"module": "GroupModule"}, "policy": {"module": "ServingModule"}}


class Tampering:
    """A target whose buckets have one bit of their last tensor flipped on the way."""

    def __init__(self, model):
        self.model = model
        self.store = model.store

    def run(self, function, references, *arguments, **keywords):
        return self.model.run(function, [self._flip(ref) for ref in references], *arguments, **keywords)

    def _flip(self, ref):
        *others, last = self.store.get(ref)
        data = np.array(last.data)
        data[0] ^= 4
        return self.store.put([*others, replace(last, data=data)])


def test_the_target_serves_the_new_weights(make, prompts):
    cluster = make(MODELS)
    trainer, policy = cluster.models["trainer"], cluster.models["policy"]
    sync = WeightSync(trainer, policy)
    assert policy.serving().result() == (-1, {})
    for _ in range(2):
        trainer.train_step(prompts)
    stats = sync(7)
    assert policy.serving().result() == (7, SERVED)
    assert stats["sync/bytes"] == Total(0 if cluster.store.in_process else 16 + 16 + 8)


def test_what_training_does_not_change_moves_once(make, prompts):
    cluster = make(MODELS)
    trainer, policy = cluster.models["trainer"], cluster.models["policy"]
    sync = WeightSync(trainer, policy, overlap=True)
    assert sync(0)["sync/bytes"] == Total(16 + 16 + 8)
    for _ in range(2):
        trainer.train_step(prompts).result()
    assert sync(1)["sync/bytes"] == Total(16 + 8)
    assert policy.serving().result() == (1, SERVED)


def test_after_a_failure_everything_is_moved_again(make, prompts):
    cluster = make(MODELS)
    trainer, policy = cluster.models["trainer"], cluster.models["policy"]
    sync = WeightSync(trainer, Tampering(policy), transport=through_store)
    with pytest.raises(WorkerError, match="arrived damaged"):
        sync(0)
    sync.target = policy
    assert sync(0)["sync/bytes"] == Total(16 + 16 + 8)


def test_in_one_process_the_live_tensors_are_adopted(make, prompts):
    cluster = make(MODELS)
    trainer, policy = cluster.models["trainer"], cluster.models["policy"]
    WeightSync(trainer, policy)(0)
    trainer.train_step(prompts).result()
    _, weights = policy.serving().result()
    assert weights["model.weight"] == [2.0 if cluster.store.in_process else 1.0] * 4


def test_a_damaged_bucket_is_refused_and_the_old_version_keeps_serving(make, prompts):
    cluster = make(MODELS)
    trainer, policy = cluster.models["trainer"], cluster.models["policy"]
    WeightSync(trainer, policy, transport=through_store)(1)
    before = policy.serving().result()
    trainer.train_step(prompts).result()
    with pytest.raises(
        WorkerError, match=r"verify_buckets failed in policy.*weight 'model.half' arrived damaged"
    ) as caught:
        WeightSync(trainer, Tampering(policy), transport=through_store)(2)
    assert isinstance(caught.value.cause, WeightError)
    assert policy.serving().result() == before  # the run goes on, too
    WeightSync(trainer, policy, transport=through_store)(2)
    assert policy.serving().result()[0] == 2


def test_a_target_that_computes_meanwhile_gets_weights_that_stand_still(make, prompts):
    cluster = make(MODELS)
    trainer, policy = cluster.models["trainer"], cluster.models["policy"]
    WeightSync(trainer, policy, overlap=True)(0)
    trainer.train_step(prompts).result()
    _, weights = policy.serving().result()
    assert weights["model.weight"] == [1.0] * 4
