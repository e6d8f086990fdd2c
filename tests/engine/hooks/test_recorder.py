"""What a run writes of itself, for programs that only look at it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

from coalign.cluster.choice import plan_slots
from coalign.cluster.dry import FlowGraph
from coalign.cluster.future import Call
from coalign.cluster.placement.nodes import Node, assign_nodes, place_processes
from coalign.cluster.placement.slots import list_slots
from coalign.config.schema import ModelConfig
from coalign.engine.hooks.recorder import StructureRecord

HERE = "tests.cluster.modules"


def test_a_run_writes_its_flow_and_its_placement_and_again_what_was_placed_anew(tmp_path):
    models = {
        "policy": ModelConfig(module=f"{HERE}:EchoModule", num_gpu=4, tensor_parallel=2),
        "judge": ModelConfig(module=f"{HERE}:SumModule", num_gpu=4),
        "reward": ModelConfig(module=f"{HERE}:SumModule", num_process=2),
    }
    slots = plan_slots(models, [["policy", "judge"]])
    nodes = [Node("a", 4, 4), Node("b", 0, 0, cores=64)]
    placed = place_processes(list_slots(slots), assign_nodes(list_slots(slots), nodes), [[["0", "1", "2", "3"]], []])
    graph = FlowGraph()
    graph.add(Call(None, "prompts"), {}, ["tokens"])
    graph.add(Call("policy", "generate"), {"prompts": ["tokens"]}, ["tokens", "index"])
    cluster = SimpleNamespace(nodes=nodes, slots=slots, placements=placed)
    engine: Any = SimpleNamespace(config=SimpleNamespace(algorithm="grpo"), cluster=cluster, step=0)
    record = StructureRecord(tmp_path, graph)
    record.begin(engine)
    generates = {"label": "policy.generate", "model": "policy", "method": "generate"}
    assert json.loads((tmp_path / "flow.json").read_text()) == {
        "algorithm": "grpo",
        "calls": [
            {"label": "prompts", "model": None, "method": "prompts", "reads": {}, "makes": ["tokens"]},
            generates | {"reads": {"prompts": ["tokens"]}, "makes": ["tokens", "index"]},
        ],
    }

    def read() -> dict[str, Any]:
        return json.loads((tmp_path / "placement.json").read_text())

    first = read()
    assert first["step"] == 0 and first["nodes"] == ["a", "b"]
    assert first["models"]["policy"] == {"processes": [[0, ["0", "1"]], [0, ["2", "3"]]], "in_turn_with": ["judge"]}
    assert first["models"]["reward"]["processes"] == [[1, []], [1, []]]
    engine.step = 3
    record.after_step(engine, {}, cast(Any, None))
    assert read() == first  # nothing has moved
    placed["reward"] = placed["reward"][:1]
    record.after_step(engine, {}, cast(Any, None))
    assert read()["step"] == 3 and len(read()["models"]["reward"]["processes"]) == 1
