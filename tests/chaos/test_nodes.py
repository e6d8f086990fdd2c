"""Nodes of a Ray cluster that are lost, that come, and that come back: several raylets on this machine."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.test_lost_processes import record
from tests.runs import ROOT, command, end_started_runs, exact_settings, metrics, run, settings, wait_for, weights_hash

pytest.importorskip("ray")
from tests.chaos.machines import start_machines, wait_until  # needs ray

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]
STEPS = 6


def read_log(config: dict) -> str:
    path = Path(config["output"]) / "log.txt"
    return path.read_text() if path.exists() else ""


def test_a_lost_node_is_all_of_its_processes_at_once(tmp_path):
    """The second node has a rank of the trainer and a sampler. They go on on the first one, to the same bits."""
    config = exact_settings(tmp_path, STEPS, save_every=1)
    assert run(config | {"output": str(tmp_path / "whole")}) == 0
    config["runtime"] |= {"cluster": "ray"}
    for name in ("policy", "trainer"):
        config["models"][name] |= {"num_process": 2, "placement": "spread"}
    with start_machines(cpus=1) as machines:
        second = machines.add("second")
        config["runtime"] |= {"ray_address": machines.address}
        wait_until(lambda: len(list_nodes(machines.address)) == 2)
        process = command(config)
        wait_for(lambda: len(metrics(config)) >= 2, process, 600)
        machines.kill(second)
        killed, done = time.monotonic(), len(metrics(config))
        wait_for(lambda: len(metrics(config)) >= min(done + 2, STEPS), process, 600)  # one may have been ending
        record("node lost", {"with a rank of the trainer and a sampler": time.monotonic() - killed})
        output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output
    assert re.search(r"policy: 2 on .*second × 1", output) and re.search(r"trainer: 2 on .*second × 1", output), output
    assert "is lost" in output
    assert [line["step"] for line in metrics(config)] == list(range(1, STEPS + 1))
    whole = config | {"output": str(tmp_path / "whole")}
    assert weights_hash(config, STEPS) == weights_hash(whole, STEPS)


def test_a_trainer_is_spread_over_nodes_while_its_run_goes(tmp_path):
    """It goes on from a checkpoint on disk, which all nodes see."""
    config = exact_settings(tmp_path, STEPS, save_every=0, save_minutes=1000)
    assert run(config | {"output": str(tmp_path / "whole")}) == 0
    config["runtime"] |= {"cluster": "ray"}
    with start_machines(cpus=1) as machines:
        machines.add("second")
        config["runtime"] |= {"ray_address": machines.address}
        wait_until(lambda: len(list_nodes(machines.address)) == 2)
        requests, path = tmp_path / "requests.json", tmp_path / "scaled.json"
        requests.write_text(json.dumps({2: {"trainer": 3}, 4: {"trainer": 1}}))
        path.write_text(json.dumps(config))
        command = [sys.executable, "-m", "tests.chaos.test_scaling", str(path), str(requests)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    shown = done.stdout + done.stderr
    assert done.returncode == 0, shown
    assert "trainer: 3 processes since step 2" in shown and "trainer: 1 processes since step 4" in shown
    assert [line["step"] for line in metrics(config)] == list(range(1, STEPS + 1))
    whole = config | {"output": str(tmp_path / "whole")}
    assert weights_hash(config, STEPS) == weights_hash(whole, STEPS)


def test_nodes_come_and_go(tmp_path):
    """A replica that finds no device waits; a node of another kind is not used; one that comes back is."""
    config = settings(tmp_path, "grpo", steps=2000, epochs=400, eval_at_start=False, cluster="ray", accelerator="chip")
    config["data"].pop("eval")
    for name in ("policy", "trainer"):
        config["models"][name] |= {"num_gpu": 1}
    with start_machines(cpus=2, chips=2) as machines:
        config["runtime"] |= {"ray_address": machines.address}
        process = command(config, "--quiet")  # nobody reads what it prints

        def processes() -> list[float]:
            return [line["processes/policy"] for line in metrics(config) if "processes/policy" in line]

        try:
            wait_for(lambda: len(metrics(config)) >= 2, process, 600)
            shown = subprocess.run(
                [sys.executable, "-m", "coalign.cli", "scale", config["output"], "policy=2"],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=600,
            )
            assert shown.returncode == 0 and "1 more wait for devices" in shown.stdout + shown.stderr
            before = len(metrics(config))
            machines.add("other", chips=1, kind="new")
            wait_for(lambda: "is not used for policy" in read_log(config), process, 600)
            assert "node other has new and is not used for policy, which computes on old" in read_log(config)
            first = machines.add("spot", chips=1)
            wait_for(lambda: processes() == [2], process, 600)
            assert len(metrics(config)) > before  # it has trained meanwhile
            machines.kill(first)
            wait_for(lambda: "policy goes on with 1 processes" in read_log(config), process, 600)
            machines.add("spot", chips=1)
            wait_for(lambda: processes() == [2, 2], process, 600)
            process.terminate()
            output, _ = process.communicate(timeout=300)
        finally:
            end_started_runs()
    assert process.returncode == 143, output
    lines = metrics(config)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))


def list_nodes(address: str) -> list[str]:
    """The nodes that a Ray cluster says are alive; asked in a process of its own, since a process has one Ray only."""
    code = "import json, ray, sys; ray.init(sys.argv[1]); print(json.dumps([n['NodeID'] for n in ray.nodes()]))"
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code, address], env=environment, capture_output=True, text=True, timeout=300
    )
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else []
