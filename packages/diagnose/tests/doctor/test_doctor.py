"""`coalign doctor` for real: this machine, a run's needs, sockets, and two raylets on one machine."""

import json
import os
import subprocess
import sys
import threading

import pytest
from rich.console import Console
from typer.testing import CliRunner

from coalign import load_config
from coalign.cli import app
from coalign.report.display import Display
from coalign_diagnose.doctor.doctor import diagnose, list_requirements, measure_machine, plan_request
from coalign_diagnose.doctor.network import open_sink, send_bytes
from coalign_diagnose.doctor.node_facts import (
    NodeRequest,
    find_interface_problems,
    find_read_problem,
    list_written,
    measure_node,
    try_port,
    try_to_write,
)
from tests.runs import ROOT, settings


def run_doctor(config, address=None):
    """The findings by check, and the exit code."""
    display = Display(out=Console(record=True, width=200), err=Console(width=200, stderr=True))
    code = diagnose(config, address, display, as_json=True)
    found = json.loads(display.out.export_text())["findings"]
    return {each["check"]: each for each in found}, code


def test_this_machine_and_a_run(tmp_path):
    config = load_config(settings(tmp_path, "grpo"))
    found, code = run_doctor(config)
    assert found["inputs"]["found"] == "2 models and files of data can be read"
    assert found["run folder"]["level"] == "ok" and found["versions"]["found"].startswith("python 3.")
    assert code == int(any(each["level"] == "fail" for each in found.values()))
    assert not (tmp_path / "run").exists()  # as it was before


def test_a_model_that_is_gone_and_a_folder_that_is_a_file_fail(tmp_path):
    config = load_config(settings(tmp_path, "grpo"))
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    (tmp_path / "run").write_text("a file")
    found, code = run_doctor(config)
    assert code == 1 and found["inputs"]["found"].endswith("model: it is not there")
    assert found["run folder"]["level"] == "fail" and (tmp_path / "run").read_text() == "a file"


def test_what_a_run_needs_is_asked_for(tmp_path):
    sections = settings(tmp_path, "grpo")
    sections["reward"] = {"fn": "code", "require": ["network"]}
    sections["models"]["trainer"]["compile"] = True
    config = load_config(sections)
    request = plan_request(config, has_cluster=False)
    assert request.has_compiler and request.has_sandbox and list_requirements(config) == ["network"]
    assert [key for key, *_ in request.inputs] == ["models.policy", "data.train"] or len(request.inputs) == 2
    assert plan_request(config, has_cluster=True).ports == () and plan_request(None, has_cluster=False).folder is None


def test_bytes_are_sent_and_counted():
    assert send_bytes("127.0.0.1", open_sink("127.0.0.1")) > 10**6
    with pytest.raises(OSError):
        send_bytes("127.0.0.1", 1)


def test_files_and_names_that_can_be_read(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text("{}")
    assert find_read_problem(str(tmp_path), "model") == find_read_problem(f"{tmp_path}/*.jsonl", "data") == ""
    assert find_read_problem(f"{tmp_path}/b*.jsonl", "data") == "it is not there"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "no/such" in find_read_problem("no/such", "model")


def test_marks_tell_which_folder_it_is(tmp_path):
    request = NodeRequest(folder=str(tmp_path), mark=".doctor-1")
    assert try_to_write("node/1", request) == try_to_write("node 2", request) == ""
    assert list_written(request) == ["node 2", "node/1"]


def test_ports_interfaces_and_compilers(monkeypatch):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        assert "in use" in try_port("127.0.0.1", server.getsockname()[1])
    assert try_port("127.0.0.1", 0) == ""
    assert find_interface_problems({"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "^docker"}) == {}
    assert "is nope, and there are" in find_interface_problems({"NCCL_SOCKET_IFNAME": "nope"})["NCCL_SOCKET_IFNAME"]


def test_facts_of_this_machine_are_sizes(tmp_path):
    [node] = measure_machine(NodeRequest(folder=str(tmp_path), mark="m")).nodes
    assert 0 < node.memory_free <= node.memory and {"run folder", "hub cache"} < node.disks.keys()
    assert node.versions["python"] == sys.version.split()[0] and node.limits.keys() == {"-n", "-u", "-l"}
    assert measure_node("x", "", NodeRequest()).name == "x"


def test_a_configuration_that_does_not_load_is_one_problem(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("algorithm: grpoo\n")
    refused = CliRunner().invoke(app, ["doctor", str(file)])
    assert "did you mean 'grpo'" in str(refused.exception)


RAYLETS = """
import json, os, sys, time
from ray.cluster_utils import Cluster
options = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=options)
cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20)
print(json.dumps(cluster.address), flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_raylets(tmp_path):
    pytest.importorskip("ray")
    token = "a" * 40
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0"}
    raylets = subprocess.Popen(
        [sys.executable, "-c", RAYLETS],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    stop = threading.Timer(300, raylets.kill)
    stop.start()
    try:
        address = next(json.loads(line) for line in raylets.stdout if line.startswith('"'))
        command = [sys.executable, "-m", "coalign.cli", "doctor", "--address", address, "--json"]

        def ask(**changes):
            return subprocess.run(command, cwd=ROOT, env=environment | changes, capture_output=True, text=True)

        done = ask()
        found = {each["check"]: each for each in json.loads(done.stdout)["findings"]}
        assert found["nodes"]["found"] == "2 answer" and found["clocks"]["level"] == "ok"
        assert found["bandwidth"]["found"].endswith("between nodes") and found["versions"]["level"] == "ok"
        assert done.returncode == int(any(each["level"] == "fail" for each in found.values()))
        refused = ask(RAY_AUTH_TOKEN="b" * 40)
        assert refused.returncode == 2 and "asks for another token than the one here" in refused.stderr
        assert "Traceback" not in refused.stderr
    finally:
        stop.cancel()
        raylets.stdin.close()
        raylets.wait(60)
