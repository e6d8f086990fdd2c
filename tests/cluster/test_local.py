"""The cluster of one process: calls run on the thread that computes, in order, and none holds it while it waits."""

from __future__ import annotations

import threading

import pytest
import torch

from coalign.cluster.local import LocalCluster
from coalign.config.schema import ModelConfig, RunConfig, RuntimeConfig
from coalign.data.batch import Batch
from coalign.roles import Context
from tests.cluster.modules import SumModule


class Slow(SumModule):
    """Scores once it is let go, on a thread of its own."""

    exclusive = False
    go = threading.Event()

    def forward_step(self, batch, *, into="reward"):
        assert self.go.wait(30)
        return super().forward_step(batch, into=into)


@pytest.fixture
def threads_before():
    return {*threading.enumerate()}


@pytest.fixture
def cluster(threads_before):
    Slow.go.clear()
    modules = {"policy": "EchoModule", "reference": "SumModule", "trainer": "SumModule"}
    configs = {name: ModelConfig(module=f"tests.cluster.modules:{module}") for name, module in modules.items()}
    configs["reward"] = ModelConfig(module="tests.cluster.test_local:Slow")
    with LocalCluster(RunConfig(algorithm="none", models=configs, runtime=RuntimeConfig(threads=1))) as cluster:
        for name, config in configs.items():
            cluster.spawn(name, config, Context(model=name, threads=1)).ready.result()
        yield cluster


def prompts():
    columns = {"tokens": torch.arange(3, dtype=torch.int32), "group": torch.arange(2)}
    return Batch(torch.tensor([1, 2])).with_(**columns, rows=[{}, {}])


def add_sum(margin: torch.Tensor, reward: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"reward": margin + reward}


def test_a_call_that_waits_for_its_input_holds_no_thread(cluster):
    """The reward is slow; what needs it waits, and other models compute meanwhile, each in its order."""
    policy, reference, trainer, reward = (cluster.models[n] for n in ("policy", "reference", "trainer", "reward"))
    out = policy.generate(cluster.put(prompts()))
    scored = reward.forward_step(out)
    both = cluster.apply(add_sum, reference.forward_step(out, into="margin"), scored)
    learned, after = trainer.whole(both), trainer.whole(cluster.put(prompts()))
    assert reference.forward_step(out).result().columns == ("reward",)
    assert len(policy.generate(cluster.put(prompts())).result()) == 4
    assert not any(call.done() for call in (scored, both, learned, after))  # `after` keeps to the trainer's order
    Slow.go.set()
    assert (learned.result(), after.result()) == (6, 3)
    assert both.result().fetch()["reward"].tolist() == [2.0, 2.0, 10.0, 10.0]


def test_one_thread_computes(threads_before, cluster):
    threads = {thread.name for thread in {*threading.enumerate()} - threads_before}
    assert threads == {"coalign-cpu", "coalign-reward", "coalign-deadlines"}
    where = lambda module, store: threading.current_thread().name  # noqa: E731
    assert [cluster.models[name].run(where).result() for name in ("policy", "trainer", "reward")] == [
        ["coalign-cpu"],
        ["coalign-cpu"],
        ["coalign-reward"],
    ]


def test_a_call_reserves_the_devices_that_a_sync_would_read_from(cluster, monkeypatch):
    reserved = []
    hold = cluster.hold_devices
    monkeypatch.setattr(
        cluster, "hold_devices", lambda name, *rest: reserved.append((name, rest[1])) or hold(name, *rest)
    )
    cluster.models["reference"].forward_step(cluster.put(prompts())).result()
    Slow.go.set()
    cluster.models["reward"].forward_step(cluster.put(prompts())).result()  # which computes on none
    assert reserved == [("reference", "forward_step")]


def test_an_input_that_fails_ends_the_calls_that_wait_for_it(cluster):
    failing = cluster.models["reference"].fail()
    waiting = cluster.apply(add_sum, failing)
    with pytest.raises(Exception, match="as asked"):
        waiting.result()


def test_a_call_that_hangs_on_the_thread_that_computes_ends(cluster, monkeypatch):
    monkeypatch.setattr(cluster.deadlines, "limit", 0.5)
    release = threading.Event()
    hung = cluster.models["policy"].run(lambda module, store: release.wait())
    with pytest.raises(Exception, match=r"no answer within 0.5 s \(runtime.call_timeout\)"):
        hung.result()
    release.set()
