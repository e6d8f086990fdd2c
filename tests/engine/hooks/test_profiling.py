"""Traces of the steps that were asked for."""

from __future__ import annotations

import gzip
import json
from types import SimpleNamespace

import pytest
import torch

from coalign.cluster.future import WorkerError
from coalign.config.schema import ProfileConfig
from coalign.engine.hooks.timeline import StepProfiler
from tests.cluster.threads import thread_cluster
from tests.runs import run, settings


class TracedModel:
    """Notes what it is asked for."""

    def __init__(self, name, said):
        self.name, self.said = name, said

    def trace(self, verb, *arguments):
        what = arguments[1] if verb == "start_trace" else arguments[0].rpartition("/")[2]
        self.said.append(f"{self.name} {verb.removesuffix('_trace')} {what}")
        return SimpleNamespace(result=lambda: None)


@pytest.mark.parametrize(
    ("profile", "in_process", "expected"),
    [
        (
            {"steps": [2, 3], "models": ["trainer"]},
            False,
            ["trainer start 2", "trainer stop step_2", "trainer start 3", "trainer stop step_3"],
        ),
        ({"steps": [1]}, False, ["policy start 1", "trainer start 1", "policy stop step_1", "trainer stop step_1"]),
        ({"steps": [1]}, True, ["policy start 1", "policy stop step_1"]),
    ],
    ids=["the steps and the model that are named", "all models", "the models of one process in one trace"],
)
def test_each_step_that_is_named_has_a_trace_of_its_own(tmp_path, profile, in_process, expected):
    said = []
    models = {name: TracedModel(name, said) for name in ("policy", "trainer")}
    cluster = SimpleNamespace(store=SimpleNamespace(in_process=in_process))
    engine = SimpleNamespace(step=0, running=models, cluster=cluster)
    profiler = StepProfiler(ProfileConfig(**profile), tmp_path, engine)
    for _ in range(4):
        for phase in ("rollout", "train", "sync"):
            profiler.phase(phase)
        engine.step += 1
        profiler.after_step(engine, {}, None)
    assert said == expected


def test_a_worker_writes_what_it_did(tmp_path):
    with thread_cluster({"judge": {"module": "SumModule"}}) as cluster:
        judge = cluster.models["judge"]
        judge.trace("start_trace", ProfileConfig(steps=[1], shapes=True), 1).result()
        judge.sleep(0.01).result()
        judge.trace("stop_trace", str(tmp_path / "step_1")).result()
        judge.sleep(0.01).result()
    [file] = (tmp_path / "step_1").iterdir()
    assert file.name == "judge_replica0.json.gz"
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "judge.sleep" for event in events) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_nsys_needs_a_device_to_show(tmp_path):
    with thread_cluster({"judge": {"module": "SumModule"}}) as cluster:
        started = cluster.models["judge"].trace("start_trace", ProfileConfig(steps=[1], tool="nsys"), 1)
        with pytest.raises(WorkerError, match=r"runtime.profile.tool: `nsys` shows CUDA devices"):
            started.result()


def test_a_run_traces_the_model_that_is_named(tmp_path):
    config = settings(tmp_path, "sft", profile={"steps": [2], "models": ["trainer"]})
    assert run(config) == 0
    [file] = (tmp_path / "run" / "profile").rglob("*.gz")
    assert file.parent.name == "step_2" and file.name == "trainer_replica0.json.gz"
    names = {event.get("name") for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
    assert "trainer.train_step" in names and any(str(name).startswith("aten::") for name in names)
