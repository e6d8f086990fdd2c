"""Scorers begin with what is complete while the rest is generated; models that share nothing run side by side."""

from __future__ import annotations

import time

import pytest
import torch

from coalign.data.batch import Batch
from coalign.types import Total
from tests.cluster.threads import thread_cluster


def sleepy(seconds: list[float]) -> Batch:
    """Prompts of one token each, which say how long a module shall take for them (ms)."""
    tokens = torch.tensor([round(1000 * each) for each in seconds], dtype=torch.int32)
    return Batch(torch.ones(len(seconds), dtype=torch.int64)).with_(tokens=tokens, group=torch.arange(len(seconds)))


@pytest.fixture
def flow():
    """Two replicas that generate for as long as their prompts say, three independent scorers."""
    scorers = {name: {"module": "SleepyModule"} for name in ("one", "two", "three")}
    with thread_cluster({"policy": {"module": "SleepyModule", "num_process": 2}} | scorers) as cluster:
        yield cluster


def busy(future):
    """(start, stop) of all that workers did for a call."""
    return min(s.start for s in future.spans), max(s.start + s.seconds for s in future.spans)


def test_independent_scorers_take_the_time_of_the_slowest(flow):
    def over_the_slowest() -> float:
        out = flow.models["policy"].generate(sleepy([0.0, 0.0]))
        out.result()
        scored = [flow.models[name].nap(out, seconds=n) for name, n in (("one", 0.6), ("two", 0.8), ("three", 1.0))]
        slowest = max(future.seconds for future in scored)
        starts, stops = zip(*map(busy, scored), strict=True)
        assert max(starts) < min(stops)  # there is a moment at which all three compute
        return (max(stops) - min(starts)) / slowest

    assert any(over_the_slowest() <= 1.15 for _ in range(3))  # a loaded machine may start a thread late


def test_rows_of_one_replica_are_scored_while_the_other_one_generates(flow):
    out = flow.models["policy"].generate(sleepy([0.1, 0.5]))
    scored = flow.models["one"].forward_step(out)
    assert scored.result().fetch()["reward"].tolist() == [100.0, 500.0]
    assert scored.stats == {"handled": Total(2)}
    first, last = sorted(span.start for span in scored.spans)
    slow = max(span.start + span.seconds for span in out.spans)
    assert first < slow <= last


def test_small_shares_of_one_replica_stream_too():
    models = {"policy": {"module": "SleepyModule", "shares_per_replica": 3}, "one": {"module": "SleepyModule"}}
    with thread_cluster(models) as cluster:
        out = cluster.models["policy"].generate(sleepy([0.1, 0.2, 0.4]))
        scored = cluster.models["one"].forward_step(out)
        assert scored.result().fetch()["reward"].tolist() == [100.0, 200.0, 400.0]
        assert len(scored.spans) == 3
        assert sorted(span.start for span in scored.spans)[1] < max(span.start for span in out.spans) + 0.4


def test_order_and_columns_are_those_of_a_whole_batch(flow):
    prompts = sleepy([0.3, 0.0, 0.0, 0.0])  # the first replica is the last one to answer
    out = flow.models["policy"].generate(prompts)
    streamed = flow.models["one"].forward_step(out, into="reward/slow").result()
    whole = flow.models["two"].forward_step(out.result(), into="reward/slow").result()
    assert streamed.columns == whole.columns and torch.equal(streamed.lengths, whole.lengths)
    assert torch.equal(streamed.fetch()["reward/slow"], whole.fetch()["reward/slow"])
    joined = flow.apply(_nothing, out, flow.models["three"].forward_step(out)).result()
    assert joined.fetch()["reward"].tolist() == [300.0, 0.0, 0.0, 0.0]


def _nothing(tokens):
    return {}


def test_a_replica_that_fails_ends_the_scorer_that_waits_for_it(flow):
    out = flow.models["policy"].generate(sleepy([0.1, -1.0]))
    scored = flow.models["one"].forward_step(out)
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match=r"policy.generate failed in policy, replica 1"):
        scored.result()
    assert time.monotonic() - begun < 30.0
