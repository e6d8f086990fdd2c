"""Scorers begin with what is complete while the rest is generated; models that share nothing run side by side."""

from __future__ import annotations

import time

import pytest
import torch

from coalign.cluster.future import WorkerError
from coalign.data.batch import Batch
from coalign.types import Total
from tests.cluster.modules import PartsModule
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


def test_three_independent_scorers_compute_at_once():
    scorers = {name: {"module": "MeetModule"} for name in ("one", "two", "three")}
    with thread_cluster({"policy": {"module": "SleepyModule"}} | scorers) as cluster:
        for _ in range(2):
            out = cluster.models["policy"].generate(sleepy([0.0, 0.01]))
            scored = [cluster.models[name].forward_step(out) for name in scorers]
            joined = cluster.apply(_nothing, out, *scored).result().fetch()
            spans = [span for future in scored for span in future.spans]
            assert {span.worker for span in spans} == {f"{name}, replica 0" for name in scorers}
            # None of them waited for anything but its input: there is a moment at which all three compute.
            assert max(span.start for span in spans) <= min(span.start + span.seconds for span in spans)
            assert min(span.start for span in spans) >= max(span.start + span.seconds for span in out.spans) - 0.01
            assert all(joined[f"reward/{name}"].tolist() == [0.0, 10.0] for name in scorers)


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


@pytest.fixture
def in_parts():
    """A policy that hands over its groups in three parts, the last two when the first one is being scored."""
    PartsModule.begun.clear()
    models = {"policy": {"module": "PartsModule", "parts_per_call": 3}, "one": {"module": "PartsModule"}}
    with thread_cluster(models) as cluster:
        yield cluster


def test_parts_of_one_call_are_scored_while_it_goes_on(in_parts):
    prompts = sleepy([0.001 * i for i in range(5)])
    out = in_parts.models["policy"].generate(prompts)
    scored = in_parts.models["one"].forward_step(out)
    assert scored.result().fetch()["reward"].tolist() == [i + 1.0 for i in range(5) for _ in range(2)]
    assert scored.stats == {"calls": Total(3)} and len(out.spans) == 3
    whole = out.result().fetch()
    assert whole["group"].tolist() == [i for i in range(5) for _ in range(2)]
    assert whole["index"].tolist() == [0, 1] * 5


def test_there_are_no_more_parts_than_prompts(in_parts):
    PartsModule.begun.set()
    out = in_parts.models["policy"].generate(sleepy([0.0, 0.0]), samples=1)
    assert len(out.result()) == 2 and len(out.spans) == 2
    assert len(in_parts.models["policy"].generate(sleepy([0.0])).result()) == 2


def test_a_part_that_fails_ends_the_call_and_who_waits_for_it(in_parts):
    out = in_parts.models["policy"].generate(sleepy([0.0] * 5), fails=True)
    scored = in_parts.models["one"].forward_step(out)
    with pytest.raises(WorkerError, match=r"policy.generate failed in policy, replica 0: ValueError: as asked"):
        scored.result()


def test_parts_are_the_same_on_every_cluster(make, prompts):
    cluster = make({"policy": {"module": "PartsModule", "parts_per_call": 3}})
    cluster.models["policy"].forward_step(prompts).result()  # in its own process somebody has scored
    out = cluster.models["policy"].generate(prompts, samples=3)
    parts = out.result().fetch()
    assert len(out.spans) == 3
    with thread_cluster({"policy": {"module": "EchoModule"}}) as one:
        whole = one.models["policy"].generate(prompts, samples=3).result().fetch()
    assert torch.equal(parts["tokens"], whole["tokens"]) and torch.equal(parts["index"], whole["index"])
    assert parts["rows"] == whole["rows"]


def test_a_module_that_hands_over_everything_at_once_says_so():
    said = pytest.raises(WorkerError, match=r"models.policy.parts_per_call: .*EchoModule` hands over everything")
    with thread_cluster({"policy": {"module": "EchoModule", "parts_per_call": 2}}) as cluster, said:
        cluster.models["policy"].generate(sleepy([0.0, 0.0])).result()


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


def test_in_any_order_a_call_without_its_input_fails_before_its_turn():
    with thread_cluster({"one": {"module": "SleepyModule"}}) as cluster:
        busy = cluster.models["one"].generate(sleepy([2.0]))
        with cluster.defer_errors(), cluster.any_order():
            scored = cluster.models["one"].forward_step(cluster.apply(_fail, sleepy([0.0])))
            with pytest.raises(WorkerError, match="as asked"):
                scored.result()
            assert not busy.done()


def _fail(tokens):
    raise ValueError("as asked")
