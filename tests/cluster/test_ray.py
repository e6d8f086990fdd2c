"""What only several processes can show: shares, ranks, and payloads that stay away from the driver."""

from __future__ import annotations

import os
import pickle
import socket

import pytest
import torch

from coalign.cluster.batch_ref import BatchRef
from coalign.cluster.future import WorkerError
from coalign.cluster.ray import connection
from coalign.cluster.ray.actor import RayWorker
from coalign.config.schema import ModelConfig, RunConfig, RuntimeConfig
from coalign.data.batch import Batch
from coalign.types import Total
from tests.cluster.conftest import find_pid
from tests.cluster.test_apply import centre

ray = pytest.importorskip("ray")


def test_six_processes_fit_on_two_cores(ray_cluster):
    pids = [model.run(find_pid).result() for model in ray_cluster.models.values()]
    assert len({pid for model in pids for pid in model} | {os.getpid()}) == 6


def test_replicas_share_by_tokens_with_groups_whole_and_order_kept(ray_cluster, prompts):
    scores = ray_cluster.models["policy"].forward_step(prompts).result()
    # Groups of 4, 4, 6, 2 and 6 tokens: {6, 4} and {6, 2, 4} differ least.
    assert sorted(int(prompts.lengths[scores.which == part].sum()) for part in (0, 1)) == [10, 12]
    assert scores.which[0] == scores.which[1] and scores.which[3] == scores.which[4]
    assert scores.fetch()["reward"].tolist() == [float(row["tokens"].sum()) for row in prompts.rows()]


def test_batches_by_keyword_are_cut_on_their_own(ray_cluster, prompts):
    lengths = torch.tensor([5, 5, 5])
    other = Batch(lengths).with_(tokens=torch.zeros(15, dtype=torch.int32), group=torch.arange(3))
    stats = ray_cluster.models["trainer"].beside(prompts, other=other).result()
    assert stats == {"tokens": Total(22), "other_0": Total(2), "other_1": Total(1)}
    stats = ray_cluster.models["trainer"].beside(prompts, other=other.slice(0, 0)).result()
    assert stats == {"tokens": Total(22), "other_0": Total(0), "other_1": Total(0)}


def test_prompts_are_shared_by_number(ray_cluster):
    lengths = torch.tensor([100, 1, 1, 1])
    prompts = Batch(lengths).with_(tokens=torch.arange(103, dtype=torch.int32), group=torch.arange(4))
    out = ray_cluster.models["policy"].generate(prompts, samples=2).result()
    assert out.which.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert out.fetch()["tokens"][:100].tolist() == list(range(1, 101))


def test_the_result_does_not_depend_on_the_number_of_replicas(ray_cluster, make_local, prompts):
    local = make_local({"policy": {"module": "SumModule"}})
    results = []
    for cluster in (ray_cluster, local):
        out = cluster.models["policy"].generate(prompts, samples=3)
        results.append(cluster.apply(centre, out, cluster.models["policy"].forward_step(out)).result().fetch())
    ours, theirs = results
    assert {**ours.token, **ours.sequence}.keys() == {**theirs.token, **theirs.sequence}.keys()
    for name in ("tokens", "group", "index", "reward", "advantage"):
        assert torch.equal(ours[name], theirs[name])


def test_ranks_know_their_place_and_where_to_meet(ray_cluster):
    places = ray_cluster.models["trainer"].run(_place).result()
    assert [place[:2] for place in places] == [(0, 2), (1, 2)]
    meeting = {place[2] for place in places}
    assert len(meeting) == 1 and int(meeting.pop().rpartition(":")[2]) > 0
    assert ray_cluster.models["policy"].run(_place).result() == [(0, 1, None), (0, 1, None)]


def _place(module, store):
    return module.context.rank, module.context.world_size, module.context.rendezvous


def test_every_rank_of_a_group_is_called_though_it_has_nothing_to_do(ray_cluster, prompts):
    stats = ray_cluster.models["trainer"].train_step(prompts.slice(2, 3)).result()
    assert (stats["tokens"], stats["ranks"]) == (Total(4), Total(2))


def test_replicas_without_work_are_left_alone(ray_cluster, prompts):
    future = ray_cluster.models["policy"].forward_step(prompts.slice(2, 3))
    assert len(future.result().payloads) == 1 and future.result().fetch()["reward"].tolist() == [22.0]


def test_payloads_stay_out_of_the_driver(ray_cluster, monkeypatch):
    """Metas are small whatever the payload, and a whole flow fetches nothing here."""
    lengths = torch.full((64,), 2000)
    big = Batch(lengths).with_(
        tokens=torch.arange(128_000, dtype=torch.int32), group=torch.arange(64), padding=torch.zeros(128_000, 8)
    )
    ref = ray_cluster.put(big)
    metas = []
    execute = RayWorker.execute

    def watched(self, verb, *arguments):
        running = execute(self, verb, *arguments)
        metas.append(running.meta)
        return running

    monkeypatch.setattr(RayWorker, "execute", watched)
    monkeypatch.setattr(BatchRef, "fetch", lambda *_: pytest.fail("the driver fetched a payload"))
    monkeypatch.setattr(ray, "get", lambda *_, **__: pytest.fail("the driver fetched an object"))
    out = ray_cluster.models["policy"].generate(ref, samples=2)
    scores = ray_cluster.models["policy"].forward_step(out)
    stats = ray_cluster.models["trainer"].train_step(ray_cluster.apply(centre, out, scores)).result()
    assert stats["tokens"] == Total(256_000)
    assert len(metas) == 9  # two replicas, two for the rows of each, one function, two ranks
    assert all(len(pickle.dumps(meta.result())) < 10_000 for meta in metas)  # the payload: 9 MB


def test_workers_cannot_damage_what_others_read(ray_cluster, prompts):
    ref = ray_cluster.put(prompts)
    assert not ray_cluster.models["policy"].hand_back(ref).result().fetch()["values"].any()
    assert torch.equal(ref.fetch()["tokens"], prompts["tokens"])


def test_actors_say_what_they_are(ray_cluster):
    names = [actor["name"].partition(":") for actor in ray.util.list_named_actors(all_namespaces=True)]
    assert all(run.startswith("run-") for run, _, _ in names)  # and a part of its own for every run
    assert {"policy:replica0", "policy:replica1", "judge:replica0", "trainer:rank0", "trainer:rank1"} <= {
        name for _, _, name in names
    }


@pytest.mark.parametrize("kind", ["local", "ray"])
def test_gpus_that_are_not_there_are_refused_at_once(kind, request):
    from coalign.cluster.choice import start_cluster

    if kind == "ray":
        request.getfixturevalue("ray_here")
    models = {"policy": ModelConfig(module="tests.cluster.modules:EchoModule", num_gpu=64)}
    config = RunConfig(algorithm="none", models=models, runtime=RuntimeConfig(cluster=kind))
    with pytest.raises(ValueError, match=r"the models ask for 64 devices \(policy: 64\); there are \d+ on 1 node"):
        start_cluster(config)


def test_one_process_refuses_several(make_local):
    with pytest.raises(ValueError, match=r"models.policy asks for 2 processes; use `runtime.cluster: ray`"):
        make_local({"policy": {"module": "EchoModule", "num_process": 2}})


@pytest.mark.parametrize(
    ("runtime", "model", "expected"),
    [
        ({}, {}, "local"),
        ({}, {"num_process": 2}, "ray"),
        ({}, {"num_gpu": 2}, "ray"),
        ({"ray_address": "auto"}, {}, "ray"),
        ({"cluster": "local"}, {"num_process": 2}, "local"),
        ({"cluster": "ray"}, {}, "ray"),
    ],
)
def test_auto(runtime, model, expected):
    from coalign.cluster.choice import choose_cluster

    config = RunConfig(algorithm="none", models={"m": ModelConfig(**model)}, runtime=RuntimeConfig(**runtime))
    assert choose_cluster(config) == expected


def test_the_process_of_functions_starts_with_the_models(make_ray, prompts):
    cluster = make_ray({})
    assert "functions" not in cluster.stacks()
    cluster.expect_functions()
    assert "functions" in cluster.stacks()
    joined = cluster.apply(_nothing, prompts)
    assert joined.result().columns == cluster.put(prompts).columns and {span.worker for span in joined.spans} == {
        "functions"
    }
    with pytest.raises(WorkerError, match=r"_fail failed in functions.*KeyError: 'no such thing'"):
        cluster.apply(_fail, prompts).result()


def _fail(tokens):
    raise KeyError("no such thing")


def _nothing(tokens):
    return {}


def test_an_address_that_does_not_answer_is_refused(monkeypatch):
    monkeypatch.setattr(connection, "CONNECT_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts, and says nothing
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ValueError, match=rf"runtime\.ray_address: no Ray cluster answers at {address} .*0\.3 s"):
            connection.connect(address)
