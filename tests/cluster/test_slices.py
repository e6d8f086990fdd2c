"""Continuous generation: replicas take rows as they have room, and weights and urgent calls between two slices."""

import os
import signal
import time

import pytest
import torch

from coalign.cluster.future import WorkerError
from coalign.cluster.placement.nodes import NoPlaceError
from coalign.data.batch import Batch
from tests.cluster.conftest import ON_RAY_SLOW, find_pid


@pytest.fixture
def policy(make):
    policy = make({"policy": {"module": "SlicedModule"}}).models["policy"]
    policy.generate_continuously()
    generate(policy, 1).result()  # the process has started
    return policy


def prompts(*ticks, first=0):
    """One prompt a group; each takes so many ticks of 10 ms."""
    groups = torch.arange(first, first + len(ticks))
    return Batch(torch.ones(len(ticks)), {"tokens": torch.tensor(ticks, dtype=torch.int32)}, {"group": groups})


def generate(policy, *ticks, first=0, **options):
    return policy.generate(policy.cluster.put(prompts(*ticks, first=first)), **options)


def install(module, store, version):
    module.version = version


@ON_RAY_SLOW
def test_a_call_gets_its_own_rows_whatever_ends_first(policy):
    long, short = generate(policy, 30), generate(policy, 2, first=1)
    assert short.result().group.tolist() == [1] and not long.done()
    assert long.result().fetch()["tokens"].tolist() == [31]
    assert long.stats["handled"].value == 1
    assert long.spans and sum(span.seconds for span in long.spans) > 0.25


@ON_RAY_SLOW
def test_a_weight_update_waits_for_a_slice_not_for_a_response(policy):
    long = generate(policy, 200)
    while not long.running:
        time.sleep(0.01)
    policy.run(install, 7).result()
    assert not long.done()


@ON_RAY_SLOW
def test_rows_of_a_later_call_wait_for_the_weights_under_way(policy):
    before = generate(policy, 40)
    policy.slices.begin_sync()
    after = generate(policy, 1, first=1)
    assert before.result() and not after.done()
    policy.run(install, 3).result()
    policy.slices.end_sync()
    assert after.result().fetch()["versions"].tolist() == [3]


@ON_RAY_SLOW
def test_evaluation_goes_first(make):
    cluster = make({"policy": {"module": "SlicedModule"}})
    policy = cluster.models["policy"]
    policy.generate_continuously()
    policy.slices.begin_sync()  # nothing begins yet
    training = generate(policy, 1)
    time.sleep(0.05)
    evaluation = generate(policy, 1, first=-1)
    while len(policy.slices._waiting) < 2:
        time.sleep(0.01)
    assert [share.rows.rows.tolist() for share in policy.slices._waiting] == [[0], [0]]
    assert policy.slices._waiting[0].urgent
    policy.slices.end_sync()
    assert evaluation.result() and training.result()


@ON_RAY_SLOW
def test_an_error_of_a_slice_is_that_of_its_call(policy):
    with pytest.raises(WorkerError, match=r"policy.generate failed in policy.*as asked"):
        generate(policy, 1, broken=True).result()


@ON_RAY_SLOW
def test_a_scorer_takes_what_comes_first(make):
    cluster = make({"policy": {"module": "SlicedModule"}, "judge": {"module": "RewardLikeModule"}})
    policy, judge = cluster.models["policy"], cluster.models["judge"]
    policy.generate_continuously()
    with cluster.any_order():
        long, short = generate(policy, 60), generate(policy, 1, first=1)
        late, early = judge.forward_step(long), judge.forward_step(short)
    assert early.result().fetch()["reward"].tolist() == [2.0] and not late.done()
    assert late.result().fetch()["reward"].tolist() == [61.0]


@pytest.mark.slow
def test_a_slow_replica_holds_nobody_up(make_ray):
    policy = make_ray({"policy": {"module": "SlicedModule", "num_process": 2}}).models["policy"]
    policy.generate_continuously()
    generate(policy, 1, 1).result()
    begun = time.monotonic()
    calls = [generate(policy, 20, first=i) for i in range(40)]
    for call in calls:
        call.result()
    # 40 in flight: half each, and the slow one (0.8 s for 20 ticks) takes as long as it takes for its own.
    assert time.monotonic() - begun < 3.0


@pytest.mark.slow
def test_the_others_go_on_without_a_replica_that_finds_no_place(make_ray, monkeypatch):
    policy = make_ray({"policy": {"module": "SlicedModule", "num_process": 2}}).models["policy"]
    policy.generate_continuously()
    generate(policy, 1, 1).result()

    def find_no_place(worker):
        raise NoPlaceError("no node is left")

    monkeypatch.setattr(type(policy.ranks[0]), "replace", find_no_place)
    calls = [generate(policy, 20, first=i) for i in range(8)]
    os.kill(policy.run(find_pid).result()[1], signal.SIGKILL)
    assert [call.result().group.tolist() for call in calls] == [[i] for i in range(8)]
    assert policy.processes == 1 and policy.config.num_process == 1
    assert generate(policy, 1, first=9).result().group.tolist() == [9]
