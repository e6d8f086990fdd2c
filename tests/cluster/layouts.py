"""Layouts on a Ray cluster of three nodes on this machine, two of them with four devices each: run as a program (a
process has one Ray only), it prints as JSON where every process found itself, and what came of a flow."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster as Machines
from ray.util.placement_group import placement_group, remove_placement_group

from coalign.cluster.choice import start_cluster
from coalign.config.schema import ModelConfig, RunConfig, RuntimeConfig
from coalign.data.batch import Batch
from coalign.roles import Context

MODULES = {"policy": "EchoModule", "judge": "SumModule", "trainer": "GroupModule"}
ALL = [[*MODULES]]
CHIP = {"accelerator": "chip"}  # stands for devices where there are none
# {layout: (models, colocation, further settings)}
LAYOUTS: dict[str, tuple[dict[str, dict[str, Any]], list[list[str]], dict[str, Any]]] = {
    "exclusive": (
        {"policy": {"num_gpu": 2, "tensor_parallel": 2}, "judge": {"num_gpu": 2}, "trainer": {"num_gpu": 4}},
        [],
        {},
    ),
    "shared": (
        {"policy": {"num_gpu": 4, "tensor_parallel": 2}, "judge": {"num_gpu": 4}, "trainer": {"num_gpu": 4}},
        ALL,
        CHIP,
    ),
    "partly": (
        {"policy": {"num_gpu": 4, "tensor_parallel": 4}, "judge": {"num_gpu": 4}, "trainer": {"num_gpu": 8}},
        ALL,
        CHIP,
    ),
    "single": ({"policy": {"num_gpu": 1}, "judge": {"num_gpu": 1}, "trainer": {"num_gpu": 1}}, ALL, CHIP),
    "spread": (
        {"policy": {"num_gpu": 4, "tensor_parallel": 2, "placement": "spread"}, "judge": {}, "trainer": {"num_gpu": 2}},
        [],
        {},
    ),
}


def cluster(models: dict[str, dict[str, Any]], colocation: list[list[str]], kind: str = "ray", **runtime: Any) -> Any:
    configs = {n: ModelConfig(module=f"tests.cluster.modules:{MODULES[n]}", **m) for n, m in models.items()}
    settings = RuntimeConfig(cluster=kind, colocation=colocation, threads=1, call_timeout=300.0, **runtime)
    running = start_cluster(RunConfig(algorithm="none", models=configs, runtime=settings))
    for name, config in configs.items():
        running.spawn(name, config, Context(model=name, threads=1))
    return running


def seen(module: Any, store: Any) -> list[str]:
    """Node, torch's device, and the devices that the process may see."""
    node = ray.get_runtime_context().get_node_id()
    visible = "CUDA" if module.context.device == "cuda" else "COALIGN"
    return [node, module.context.device, os.environ.get(f"{visible}_VISIBLE_DEVICES", "")]


def flow(running: Any) -> dict[str, Any]:
    """Prompts of different lengths, their samples scored and trained on."""
    lengths = torch.tensor([3, 1, 4, 1, 5, 2, 6, 9])
    tokens = torch.arange(int(lengths.sum()), dtype=torch.int32)
    prompts = Batch(lengths).with_(tokens=tokens, group=torch.arange(8), rows=[{"id": i} for i in range(8)])
    out = running.models["policy"].generate(prompts, samples=3)
    scores = running.models["judge"].forward_step(out)
    stats = running.models["trainer"].train_step(out).result()
    made = out.result().fetch()
    return {
        "tokens": made["tokens"].tolist(),
        "index": made["index"].tolist(),
        "rows": [row["id"] for row in made["rows"]],
        "reward": scores.result().fetch()["reward"].tolist(),
        "trained": stats["tokens"].value,
        "ranks": stats["ranks"].value,
    }


def layouts(names: dict[str, str]) -> dict[str, Any]:
    found = {}
    for layout, (models, colocation, runtime) in LAYOUTS.items():
        while {ray.available_resources().get(name) for name in ("GPU", "chip")} != {8.0}:
            time.sleep(0.1)  # until the last one has given back everything
        with cluster(models, colocation, **runtime) as running:
            where = {name: model.run(seen).result() for name, model in running.models.items()}
            planned = {
                name: [[running.nodes[p.node].name, *p.devices] for p in running.placements[name]] for name in models
            }
            told = {name: [[names[node], *rest] for node, *rest in ranks] for name, ranks in where.items()}
            found[layout] = {"told": told, "planned": planned, "flow": flow(running)}
    return found


def refusals() -> dict[str, Any]:
    """More than there is; more than another job leaves; and waiting until it leaves them."""
    found: dict[str, Any] = {}
    for name, number in (("total", 9), ("together", 8)):
        begun = time.monotonic()
        try:
            cluster({"policy": {"num_gpu": number, "tensor_parallel": number if name == "together" else 1}}, [])
        except ValueError as error:
            found[name] = [str(error), time.monotonic() - begun]
    other = placement_group([{"GPU": 3}, {"GPU": 2}])
    assert other.wait(60)
    try:
        cluster({"policy": {"num_gpu": 4}}, [])
    except ValueError as error:
        found["held"] = str(error)
    threading.Timer(7.0, lambda: remove_placement_group(other)).start()
    with cluster({"policy": {"num_gpu": 8}}, [], wait_for_devices=120.0) as running:
        found["waited"] = len(running.placements["policy"])
    return found


def main() -> None:
    machines = Machines(initialize_head=True, head_node_args={"num_cpus": 4, "object_store_memory": 80 * 2**20})
    for name in ("b", "a"):
        machines.add_node(num_cpus=1, num_gpus=4, resources={"chip": 4}, node_name=name, object_store_memory=80 * 2**20)
    ray.init(address=machines.address, log_to_driver=False, namespace="coalign")
    names = {node["NodeID"]: node["NodeName"] for node in ray.nodes()}
    with cluster({name: {} for name in MODULES}, [], kind="local") as local:
        expected = flow(local)
    found = {"expected": expected, "layouts": layouts(names), "refusals": refusals()}
    ray.shutdown()
    machines.shutdown()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
