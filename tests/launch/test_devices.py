"""Devices that models get without asking for a number, and devices that are not there."""

import importlib.util

import pytest
import torch

from coalign import load_config
from coalign.cluster.choice import plan_slots
from coalign.cluster.placement.nodes import Node, assign_nodes
from coalign.cluster.placement.slots import list_slots
from coalign.config.errors import ConfigError
from coalign.launch.check import check
from coalign.launch.plan import prepare
from coalign.report.display import Display
from tests.runs import ROOT, settings, write_data

ALL = {"policy", "trainer", "reference"}


@pytest.fixture
def machine(monkeypatch):
    """Sets how many GPUs torch finds here, and whether Ray is installed."""

    def make(gpus, ray=True):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        if not ray:
            find = importlib.util.find_spec
            monkeypatch.setattr(
                "coalign.launch.device_plan.find_spec", lambda name: None if name == "ray" else find(name)
            )

    return make


def planned(directory, *overrides, algorithm="grpo"):
    grpo = ["loss.kl_coef=0.1", "models.trainer.num_gpu=auto"]  # with a reference; `like: policy` would take its number
    defaults = ["runtime.cluster=auto", *(grpo if algorithm == "grpo" else [])]
    return prepare(load_config(settings(directory, algorithm), [*defaults, *overrides]))


def numbers(plan):
    return {name: model.config.num_gpu for name, model in plan.models.items()}


def groups(plan):
    return [{*group} for group in plan.config.runtime.colocation]


def test_without_devices_everything_computes_on_the_cpu(tmp_path, machine):
    machine(0)
    plan = planned(tmp_path)
    assert {*numbers(plan).values()} == {0} and not groups(plan) and not plan.devices


@pytest.mark.parametrize("gpus", [0, 1, 2])
def test_what_needs_several_processes_is_refused_once_devices_are_known(tmp_path, machine, gpus):
    machine(gpus)
    if gpus > 1:
        assert planned(tmp_path, "models.trainer.cpu_offload=true", algorithm="sft").configs["trainer"].cpu_offload
        return
    with pytest.raises(ConfigError, match=r"models\.trainer\.cpu_offload: needs a model that several processes share"):
        planned(tmp_path, "models.trainer.cpu_offload=true", algorithm="sft")


@pytest.mark.parametrize(
    ("gpus", "said"),
    [(1, "policy, trainer, reference: 1 GPU in turn"), (8, "policy, trainer, reference: 8 GPUs in turn")],
)
def test_models_share_all_devices_in_turn(tmp_path, machine, gpus, said):
    machine(gpus)
    plan = planned(tmp_path)
    assert numbers(plan) == {**dict.fromkeys(ALL, gpus), "reward_functions": 0}
    assert groups(plan) == [ALL] and plan.devices == f"num_gpu is auto; {said}"


def test_a_single_model_shares_with_nobody(tmp_path, machine):
    machine(4)
    plan = planned(tmp_path, algorithm="sft")
    assert numbers(plan) == {"trainer": 4} and not groups(plan)
    assert plan.devices == "num_gpu is auto; trainer: 4 GPUs"


@pytest.mark.parametrize(("gpus", "apart"), [(1, False), (2, False), (3, True), (8, True)])
@pytest.mark.parametrize("how", ["asked for", "no Ray"])
def test_in_one_process_models_spread_over_devices(tmp_path, machine, gpus, apart, how):
    machine(gpus, ray=how != "no Ray")
    plan = planned(tmp_path, *(["runtime.cluster=local"] if how == "asked for" else []))
    assert numbers(plan) == {**dict.fromkeys(ALL, 1), "reward_functions": 0}
    assert groups(plan) == ([] if apart else [ALL])


@pytest.mark.parametrize(
    ("overrides", "expected", "shared"),
    [
        (["models.policy.num_gpu=4"], {"policy": 4, "trainer": 4, "reference": 4}, [{"trainer", "reference"}]),
        (["models.policy.num_gpu=6"], {"policy": 6, "trainer": 2, "reference": 2}, [{"trainer", "reference"}]),
        (["models.policy.num_gpu=0"], {"policy": 0, "trainer": 8, "reference": 8}, [{"trainer", "reference"}]),
        (
            ["models.policy.num_process=2", "models.trainer.num_process=null"],
            {"policy": 0, "trainer": 8, "reference": 8},
            [{"trainer", "reference"}],
        ),
        (
            ["runtime.colocation=[[trainer, reference]]"],
            {"trainer": 4, "reference": 4, "policy": 4},
            [{"trainer", "reference"}],
        ),
        (
            ["runtime.colocation=[[trainer, reference]]", "models.trainer.num_gpu=6"],
            {"trainer": 6, "reference": 6, "policy": 2},
            [{"trainer", "reference"}],
        ),
        (["runtime.accelerator=chip"], dict.fromkeys(ALL, 0), []),
    ],
)
def test_what_other_models_ask_for_is_left_to_them(tmp_path, machine, overrides, expected, shared):
    machine(8)
    plan = planned(tmp_path, *overrides)
    assert numbers(plan) == {**expected, "reward_functions": 0}
    assert groups(plan) == shared


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["models.trainer.num_gpu=8"], r"models\.policy\.num_gpu: is auto, and of 8 other models leave none for it"),
        (
            ["models.trainer.tensor_parallel=3"],
            r"models\.trainer\.tensor_parallel: is 3, which does not divide num_gpu \(8\)",
        ),
        (["runtime.accelerator=cuda"], r"runtime\.accelerator: is cuda; Ray's name of it is GPU"),
        (["runtime.accelerator=tpu"], r"runtime\.accelerator: is tpu; supported: GPU, NPU, HPU"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, machine, overrides, message):
    machine(8)
    with pytest.raises(ConfigError, match=message):
        planned(tmp_path, *overrides)


@pytest.mark.parametrize(
    ("gpus", "overrides", "message"),
    [
        (
            0,
            ["models.trainer.num_gpu=1"],
            r"models\.trainer\.num_gpu: is 1, and torch finds no GPU on this machine; 0 comp",
        ),
        (2, ["models.trainer.num_gpu=4"], r"models\.trainer\.num_gpu: the models ask for 4 devices .*there are 2"),
    ],
)
def test_check_refuses_devices_that_are_not_there(tmp_path, machine, gpus, overrides, message):
    machine(gpus)
    config = load_config(settings(tmp_path, "sft"), [*overrides, "runtime.cluster=ray"])
    with pytest.raises(ConfigError, match=message):
        check(config, Display(quiet=True))


def test_devices_of_a_ray_cluster_are_counted_there(tmp_path, machine, monkeypatch):
    machine(0)
    asked = []

    def count(address, resource):
        asked.append((address, resource))
        return 16

    monkeypatch.setattr("coalign.cluster.ray.connection.count_cluster_devices", count)
    plan = planned(tmp_path, "runtime.ray_address=head:6379")
    assert {numbers(plan)[name] for name in ALL} == {16} and groups(plan) == [ALL]
    assert asked == [("head:6379", "GPU")]
    config = load_config(settings(tmp_path, "grpo"), ["runtime.ray_address=head:6379"])
    assert {*numbers(prepare(config, join=False)).values()} == {0} and len(asked) == 1


@pytest.mark.parametrize(
    ("example", "gpus", "layout"),
    [
        ("one_gpu", 1, {"policy": (1, 1), "trainer": (1, 1), "reference": (1, 1)}),
        ("eight_gpus", 8, {"policy": (4, 2), "trainer": (8, 1), "reference": (8, 1)}),
        ("two_nodes", 16, {"policy": (4, 2), "trainer": (8, 1), "reference": (8, 1)}),
    ],
)
def test_the_examples_for_gpus_fit_on_them(tmp_path, machine, monkeypatch, example, gpus, layout):
    """Nodes of eight GPUs hold them; ``layout``: processes of each model, and the devices of each."""
    machine(min(gpus, 8))
    monkeypatch.setattr("coalign.cluster.ray.connection.count_cluster_devices", lambda address, resource: gpus)
    model = settings(tmp_path, "grpo")["models"]["policy"]["load"]
    data = write_data(tmp_path, "grpo")
    overrides = [f"models.policy.load={model}", f"data.train={data}", f"data.eval={data}"]
    plan = prepare(load_config(ROOT / f"examples/gpu/{example}.yaml", overrides))
    slots = plan_slots(plan.started, plan.config.runtime.colocation)
    found = {name: slots[name].footprints[name] for name in layout}
    assert {name: (own.processes, own.devices) for name, own in found.items()} == layout
    assign_nodes(list_slots(slots), [Node(f"node {i}", min(gpus, 8), min(gpus, 8)) for i in range(max(1, gpus // 8))])
    assert (slots["policy"] is slots["trainer"]) == (example != "two_nodes")
