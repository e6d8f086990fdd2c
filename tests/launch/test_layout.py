"""Where models live, as `coalign check` and the start of a run tell it."""

from __future__ import annotations

import pytest
from rich.console import Console

from coalign.cluster.choice import plan_slots
from coalign.cluster.placement.nodes import Node, assign_nodes, place_processes
from coalign.cluster.placement.slots import list_models_sharing_devices, list_slots
from coalign.config.errors import ConfigError
from coalign.config.schema import ModelConfig, RunConfig, RuntimeConfig
from coalign.launch.layout import describe_assigned_layout, describe_requested_layout

HERE = "tests.cluster.modules"
MODELS = {
    "trainer": ModelConfig(module=f"{HERE}:GroupModule", num_gpu=8),
    "policy": ModelConfig(module=f"{HERE}:EchoModule", num_gpu=4, tensor_parallel=2),
    "judge": ModelConfig(module=f"{HERE}:SumModule", num_gpu=4),
    "reward": ModelConfig(module=f"{HERE}:SumModule", num_process=2),
}
COLOCATION = [["trainer", "policy", "judge"]]


def shown(models, **runtime) -> list[list[str]]:
    config = RunConfig(algorithm="none", models=models, runtime=RuntimeConfig(**runtime))
    console = Console(width=140)
    with console.capture() as capture:
        console.print(describe_requested_layout(models, config))
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in capture.get().splitlines()]


def test_what_is_asked_for():
    title, _, *rows = shown(MODELS, colocation=COLOCATION)
    assert title == ["placement: 8 devices (GPU)"]
    assert rows == [
        ["trainer", "GroupModule", "8", "8", "trainer+policy+judge: 0–7", "policy, judge"],
        ["policy", "EchoModule", "2 × 2", "2", "trainer+policy+judge: 0–1 2–3", "trainer"],
        ["judge", "SumModule", "4", "4", "trainer+policy+judge: 4–7", "trainer"],
        ["reward", "SumModule", "2", "2", "CPU"],
    ]
    assert shown({"reward": MODELS["reward"]})[0] == ["placement: no devices"]
    wrapped = MODELS["reward"].model_copy(update={"module": "fsdp", "cache": "cache"})
    assert shown({"reward": wrapped})[2][1] == "cached around fsdp"


def test_what_was_found():
    slots = plan_slots(MODELS, COLOCATION)
    nodes = [Node("a", 4, 4), Node("b", 4, 4), Node("c", 0, 0, cores=64)]
    where = assign_nodes(list_slots(slots), nodes)
    found = place_processes(list_slots(slots), where, [[["0", "1", "2", "3"]], [["0", "1", "2", "3"]], []])
    assert describe_assigned_layout(slots, found, nodes) == [
        "trainer: 8 on a [0][1][2][3], b [0][1][2][3]; in turn with policy, judge",
        "policy: 2 × 2 on a [0,1][2,3]; in turn with trainer",
        "judge: 4 on b [0][1][2][3]; in turn with trainer",
        "reward: 2 on c × 2",
    ]


def test_models_side_by_side_do_not_wait_for_each_other():
    slots = plan_slots(MODELS, COLOCATION)
    assert (
        list_models_sharing_devices(slots, "policy") == ["trainer"]
        and list_models_sharing_devices(slots, "reward") == []
    )


def test_a_module_that_cannot_be_cut_over_devices_is_refused():
    models = {"trainer": ModelConfig(module="tests.cluster.modules:MarkModule", num_gpu=2, tensor_parallel=2)}
    with pytest.raises(ConfigError, match=r"models\.trainer\.tensor_parallel: is 2, and the module `.*` is not cut"):
        shown(models)


def test_numbers_that_do_not_divide_are_refused_by_the_check():
    models = {"policy": MODELS["policy"].model_copy(update={"num_process": 3})}
    with pytest.raises(ConfigError, match=r"models\.policy\.num_process: is 3; num_gpu=4 does not divide by it, 2 for"):
        shown(models)
