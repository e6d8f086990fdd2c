"""Checkpoints in the memory of several nodes: several raylets on this machine, each with a folder of its own.

The memory of a node that is lost is deleted with it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coalign.run_files.checkpoints import name_memory_folder
from tests.chaos.test_lost_processes import measure, record, train
from tests.runs import ROOT, exact_settings, metrics, weights_hash

pytest.importorskip("ray")
from tests.chaos.machines import start_machines, wait_until  # needs ray
from tests.chaos.test_nodes import list_nodes

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]
STEPS = 7
FOURTH = {f"step_{step}; step {step + 1} is made again" for step in (3, 4)}  # its copy may not have been complete


def configure(directory: Path, name: str, **runtime: Any) -> dict[str, Any]:
    """No checkpoint on the disk comes before the last one."""
    options = {"save_every": 0, "save_minutes": 1000, "save_in_memory_every": 1, **runtime}
    return exact_settings(directory, STEPS, **options) | {"output": str(directory / name)}


def lose(node: Any, step: int, phase: str, delay: float = 0.0) -> dict[str, Any]:
    """The fault that a node is lost."""
    pid = node.all_processes["raylet"][0].process.pid
    return {"step": step, "phase": phase, "raylet": pid, "node": node.node_id, "delay": delay}


def read_log(config: dict[str, Any]) -> str:
    return (Path(config["output"]) / "log.txt").read_text()


def check(config: dict[str, Any], expected: str) -> None:
    assert [line["step"] for line in metrics(config)] == list(range(1, STEPS + 1))
    assert weights_hash(config, STEPS) == expected, read_log(config)
    base = name_memory_folder(Path(config["output"]))
    assert not list(base.parent.glob(f"{base.name}*")), "the memory is not freed"
    assert not (Path(config["output"]) / ".keepers").exists()


def test_nodes_with_ranks_of_the_trainer_are_lost_with_their_memory(undisturbed):
    """The ranks go on from the copies that other nodes hold. Each loss costs the step under way, and no other."""
    directory, expected = undisturbed
    config = configure(directory, "nodes", cluster="ray", restarts=99)
    config["models"]["trainer"] |= {"num_process": 2, "placement": "spread"}
    with start_machines(cpus=1) as machines:
        second, third = machines.add("second"), machines.add("third")
        config["runtime"] |= {"ray_address": machines.address}
        wait_until(lambda: len(list_nodes(machines.address)) == 3)
        faults = [lose(second, 2, "train", 0.01), lose(third, 4, "rollout", 0.02)]
        output, happened = train(config, faults)
    check(config, expected)
    shown = read_log(config)
    assert shown.count("checkpoints in memory are on") >= 2, shown  # another partner was chosen
    again = [line.rsplit("/", 1)[1] for line in shown.splitlines() if "is made again" in line]
    assert 1 <= len(again) <= 2 and set(again) <= {"step_2; step 3 is made again", *FOURTH}, again
    record("node lost with its memory", {str(number): value for number, value in measure(happened).items()})
    assert "cannot be read" not in output


def test_a_driver_on_a_node_without_ranks_is_killed_and_the_trainer_moves(undisturbed):
    """The next driver finds the checkpoints of both nodes; then the trainer's node is lost, and the driver's has the
    copy."""
    directory, expected = undisturbed
    config = configure(directory, "driver", cluster="ray", restarts=99, accelerator="chip", wait_for_devices=60)
    config["models"]["trainer"] |= {"num_gpu": 1}
    config["models"]["policy"] |= {"num_process": 1, "num_gpu": 0}
    with start_machines(cpus=2) as machines:
        second = machines.add("second", chips=1)
        machines.add("third", chips=1)
        config["runtime"] |= {"ray_address": machines.address}
        wait_until(lambda: len(list_nodes(machines.address)) == 3)
        faults = [{"step": 3, "phase": "train", "process": "driver", "delay": 0.01}]
        faults += [lose(second, 5, "train", 0.01)]
        output, _ = train(config, faults)
    check(config, expected)
    assert "taking over" in output
    shown = read_log(config)
    assert f"continuing from {name_memory_folder(Path(config['output']))}-" in shown
    assert "/step_3\n" in shown, shown


def test_a_trainer_is_spread_over_nodes_while_its_run_goes(undisturbed):
    directory, expected = undisturbed
    config = configure(directory, "scaled", cluster="ray", save_in_memory_every=0)
    with start_machines(cpus=1) as machines:
        machines.add("second")
        config["runtime"] |= {"ray_address": machines.address}
        wait_until(lambda: len(list_nodes(machines.address)) == 2)
        requests, path = directory / "requests.json", directory / "scaled.json"
        requests.write_text(json.dumps({2: {"trainer": 3}, 4: {"trainer": 1}}))
        path.write_text(json.dumps(config))
        command = [sys.executable, "-m", "tests.chaos.test_scaling", str(path), str(requests)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    shown = done.stdout + done.stderr
    assert done.returncode == 0, shown
    assert "trainer: 3 processes since step 2" in shown and "trainer: 1 processes since step 4" in shown
    assert "checkpoints in memory are on" in read_log(config)
    check(config, expected)
