"""Traces of the steps that were asked for."""

from __future__ import annotations

import gzip
import json

import pytest
import torch

from coalign.cluster.future import WorkerError
from coalign.config.schema import ProfileConfig
from coalign.engine.hooks.timeline import StepProfiler
from tests.cluster.threads import thread_cluster
from tests.runs import run, settings


class Told:
    """A model that notes what it is asked for."""

    def __init__(self, name, said):
        self.name, self.said = name, said

    def trace(self, verb, *arguments):
        said = arguments[1] if verb == "start_trace" else arguments[0].rpartition("/")[2]
        self.said.append((self.name, verb.removesuffix("_trace"), said))
        return self

    def result(self):
        return None


def engine(said, in_process=False):
    store = type("Store", (), {"in_process": in_process})
    models = {name: Told(name, said) for name in ("policy", "trainer")}
    return type("Engine", (), {"step": 0, "running": models, "cluster": type("Cluster", (), {"store": store})})


def steps(profile, engine, count):
    for _ in range(count):
        for phase in ("rollout", "train", "sync"):
            profile.phase(phase)
        engine.step += 1
        profile.after_step(engine, {}, None)


def test_each_step_that_is_named_has_a_trace_of_its_own(tmp_path):
    said = []
    running = engine(said)
    steps(StepProfiler(ProfileConfig(steps=[2, 3], models=["trainer"]), tmp_path, running), running, 4)
    assert said == [
        ("trainer", "start", 2),
        ("trainer", "stop", "step_2"),
        ("trainer", "start", 3),
        ("trainer", "stop", "step_3"),
    ]


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


@pytest.mark.parametrize(("in_process", "traced"), [(False, ["policy", "trainer"]), (True, ["policy"])])
def test_all_models_unless_some_are_named_and_those_of_one_process_in_one_trace(tmp_path, in_process, traced):
    said = []
    running = engine(said, in_process)
    steps(StepProfiler(ProfileConfig(steps=[1]), tmp_path, running), running, 1)
    assert [name for name, what, _ in said if what == "start"] == traced and said[-1][1:] == ("stop", "step_1")
