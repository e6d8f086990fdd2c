"""Replicas of unequal speed: small shares, handed out as replicas become free."""

from __future__ import annotations

import time

import pytest
import torch

from coalign.data.batch import Batch
from coalign.roles import Context
from coalign.types import Total
from tests.cluster.threads import thread_cluster


def scored(shares: int, rows: int = 40):
    """(seconds, rows of the slow replica) of a call, whose result is checked."""
    model = {"module": "UnevenModule", "num_process": 2, "shares_per_replica": shares}
    batch = Batch(torch.ones(rows, dtype=torch.int64)).with_(tokens=torch.arange(rows).int(), group=torch.arange(rows))
    with thread_cluster({"judge": model}) as cluster:
        begun = time.perf_counter()
        future = cluster.models["judge"].forward_step(batch)
        assert future.result().fetch()["reward"].tolist() == list(range(rows))
        seconds = time.perf_counter() - begun
        assert sum(handled.value for handled in future.stats.values()) == rows
        assert len(future.spans) == min(2 * shares, rows)
        return seconds, future.stats.get("replica_0", Total(0)).value


def test_a_slow_replica_gets_fewer_rows():
    whole, shared = scored(1), scored(10)
    assert whole[1] == 20 and 2 <= shared[1] <= 14
    assert shared[0] < whole[0]  # at best 40 rows in 40 / (1/4 + 1) rows' time: 0.32 s instead of 0.8 s


def test_more_shares_than_rows():
    assert scored(1, rows=1)[1] == 1


@pytest.mark.parametrize("shares", [1, 4])
def test_the_first_error_ends_the_call(shares):
    model = {"module": "SleepyModule", "num_process": 2, "shares_per_replica": shares}
    lengths = torch.ones(16, dtype=torch.int64)
    prompts = Batch(lengths).with_(tokens=torch.full((16,), -1, dtype=torch.int32), group=torch.arange(16))
    with thread_cluster({"policy": model}) as cluster, pytest.raises(RuntimeError, match="nobody sleeps for less than"):
        cluster.models["policy"].generate(prompts).result()


def test_silence_is_named_in_the_middle_of_shares():
    model = {"module": "UnevenModule", "num_process": 2, "shares_per_replica": 4}
    batch = Batch(torch.ones(160, dtype=torch.int64)).with_(tokens=torch.arange(160).int(), group=torch.arange(160))
    silence = pytest.raises(RuntimeError, match=r"judge, replica \d.*no answer within 0.1 s")
    with thread_cluster({"judge": model}, call_timeout=0.1) as cluster, silence:
        cluster.models["judge"].forward_step(batch).result()


@pytest.mark.parametrize(("whole", "expected"), [(True, {40}), (False, {20})])
def test_groups_stay_whole_where_the_model_says_so(whole, expected):
    """One group of forty rows for two replicas."""
    batch = Batch(torch.ones(40, dtype=torch.int64)).with_(tokens=torch.arange(40).int(), group=torch.zeros(40).long())
    with thread_cluster({"judge": {"module": "UnevenModule", "num_process": 2}}) as cluster:
        judge = cluster.models["judge"]
        judge.setup(Context(model="judge", threads=1, keep_groups=whole)).result()
        scored = judge.forward_step(batch)
        assert scored.result().fetch()["reward"].tolist() == list(range(40))
        assert {handled.value for handled in scored.stats.values()} == expected
