"""Real Ray, started by the test and then short of something: space, an answer of its raylet, a token."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.cluster.conftest import wait_gone
from tests.runs import ROOT

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

START = """
import logging, os, subprocess, sys, time
from contextlib import suppress
logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
import psutil, ray, torch
from coalign.cluster.choice import start_cluster
from coalign.cluster.ray import connection, ray_cluster, store
from coalign.cluster.ray.space import RayStoreError
from coalign.config.schema import ModelConfig, RunConfig, RuntimeConfig
from coalign.data.batch import Batch
from coalign.roles import Context

tokens = torch.arange(2_000_000, dtype=torch.int32)
big = Batch(torch.full((1000,), 2000)).with_(tokens=tokens, group=torch.arange(1000))
judge_config = ModelConfig(module="tests.cluster.modules:SumModule")

def start():
    runtime = RuntimeConfig(cluster="ray", threads=1)
    cluster = start_cluster(RunConfig(algorithm="none", models={"judge": judge_config}, runtime=runtime))
    judge = cluster.spawn("judge", judge_config, Context(model="judge", threads=1))
    judge.ready.result()
    return cluster, judge
"""


def run_driver(program: str, codes: tuple[int, ...] = (0,), **environment: str) -> str:
    """Run a driver of Ray in a process of its own; what it wrote. It must end by itself, with one of ``codes``."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_raylet_start_wait_time_s": "200"}
    env |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"} | environment
    done = subprocess.run(
        [sys.executable, "-c", START + program], env=env, capture_output=True, text=True, timeout=500, cwd=ROOT
    )
    assert done.returncode in codes, done.stdout + done.stderr
    return done.stdout + done.stderr


FULL = """
ray.init("local", num_cpus=1, include_dashboard=False, object_store_memory=80 * 2**20, namespace="coalign")
cluster, judge = start()
kept = []
try:
    for _ in range(20):
        with suppress(RayStoreError):  # of this process, for an argument
            kept.append(judge.generate(big, samples=2).result())
except Exception as error:
    print("worker:", error)
try:
    kept = [cluster.put(big) for _ in range(20)]
except RayStoreError as error:
    print("driver:", error)
store.LOOK_SECONDS, store.FULL_SECONDS = 0.5, 1.0  # by default 120 s
begun = time.monotonic()
try:
    store._use_store(lambda: time.sleep(300))  # a payload that never comes
except RayStoreError as error:
    print("reader:", error)
print("seconds:", time.monotonic() - begun)
cluster.shutdown()
"""


def test_a_store_that_is_full_is_named_where_it_is_written(tmp_path):
    """Ray itself says nothing of a worker's result that it could not store: who reads it waits for ever."""
    output = run_driver(FULL, RAY_local_fs_capacity_threshold="0.0001")
    for where in ("worker: judge.generate failed in judge, replica 0: RayStoreError: ", "driver: ", "reader: "):
        [line] = [line for line in output.splitlines() if line.startswith(where)]
        assert "is full: its 80 MiB of memory are in use" in line and "--object-store-memory=BYTES" in line
        assert "were spilled to /" in line
    assert 1.0 < float(output.partition("seconds: ")[2].split()[0]) < 60.0


SPILL = """
store.WATCH_SECONDS = 1.0
ray.init("local", num_cpus=1, include_dashboard=False, object_store_memory=80 * 2**20, namespace="coalign",
    object_spilling_directory=os.environ["SPILL"])
cluster, judge = start()
kept = [cluster.put(big) for _ in range(12)]
time.sleep(15.0)
assert [len(ref.fetch()) for ref in kept] == 12 * [1000]
cluster.shutdown()
"""


def test_the_begin_of_spilling_is_logged_once(tmp_path):
    output = run_driver(SPILL, SPILL=str(tmp_path))
    [line] = [line for line in output.splitlines() if "has begun to spill" in line]
    assert "(80 MiB)" in line and str(tmp_path) in line


STOP = """
connection.LEAVE_SECONDS, store.LOOK_SECONDS = 5.0, 2.0
cluster, judge = start()
family = psutil.Process().children(recursive=True)
[raylet] = [process for process in family if process.name() == "raylet"]
pids = [process.pid for process in family if "Agent" not in process.name()]  # these notice only after up to a minute
raylet.suspend()
begun = time.monotonic()
try:
    while time.monotonic() - begun < 300:
        if os.environ["WHAT"] == "put":
            cluster.put(big)
        judge.process().result()
        time.sleep(0.5)
except Exception as error:
    print("ended:", error)
print("seconds to the error:", time.monotonic() - begun)
cluster.shutdown()
print("seconds to the end:", time.monotonic() - begun)
print("family:", *pids)
"""


@pytest.mark.parametrize(
    ("what", "message"), [("call", "judge.process failed in judge, replica 0: worker lost: "), ("put", "its raylet is")]
)
def test_a_raylet_that_stands_still_ends_the_run_with_its_name(what, message):
    patience = {"period_ms": "1000", "timeout_ms": "1000", "failure_threshold": "3"}  # of Ray: by default, 70 s
    output = run_driver(STOP, WHAT=what, **{f"RAY_health_check_{key}": value for key, value in patience.items()})
    assert message in output.partition("ended: ")[2].partition("seconds to the error")[0]
    assert "Ray did not end within 5 s" in output
    wait_gone([int(pid) for pid in output.partition("family: ")[2].partition("\n")[0].split()])


STOP_GCS = """
connection.LEAVE_SECONDS = store.LOOK_SECONDS = store.GCS_SECONDS = ray_cluster.STACKS_SECONDS = 1.0
cluster, judge = start()
cluster.deadlines.limit = 3.0  # as runtime.call_timeout
family = psutil.Process().children(recursive=True)
[gcs] = [process for process in family if process.name() == "gcs_server"]
[worker] = [process for process in family if ":judge:" in process.name() or ":judge:" in process.cmdline()[0]]
judge.process().result()
gcs.suspend()
judge.process().result()
cluster.put(big)
print("answered")
worker.suspend()
begun = time.monotonic()
for name, what in (
    ("call", lambda: judge.process().result()), ("read", lambda: store._use_store(lambda: time.sleep(300)))
):
    try:
        what()
    except Exception as error:
        print(f"{name}:", error)
print("stacks:", *cluster.stacks().values())
cluster.shutdown()
print("seconds:", time.monotonic() - begun)
print("family:", *[process.pid for process in family if "Agent" not in process.name()])
"""


def test_a_control_store_that_stands_still_holds_nothing_up():
    """Calls and batches need it not; what waits for it has a deadline, and so has the report of a stall.

    Ray's threads, which still wait for it, may crash when the interpreter has ended.
    """
    output = run_driver(STOP_GCS, codes=(0, -11))
    assert "answered" in output
    assert "call: judge.process failed in judge, replica 0: TimeoutError: no answer within 3 s" in output
    assert "read: Ray's control store (GCS) has not answered for 1 s" in output
    assert "Ray does not answer: its GCS or a raylet stands still" in output
    assert "Ray did not end within 1 s" in output
    assert float(output.partition("seconds: ")[2].split()[0]) < 60.0
    wait_gone([int(pid) for pid in output.partition("family: ")[2].partition("\n")[0].split()])


TOKEN = """
JOIN = '''
import logging, sys
logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
from coalign.cluster.ray import connection
connection.connect(sys.argv[1])
'''
connection.connect(None)
address = ray.get_runtime_context().gcs_address
print("asks:", connection._asks_for_token(connection.find_own_node()))
joined = subprocess.run([sys.executable, "-c", JOIN, address], env=os.environ | {"RAY_AUTH_MODE": "token"})
print("joined:", joined.returncode)
"""


def test_a_cluster_that_asks_for_no_token_is_named_to_those_who_have_one():
    output = run_driver(TOKEN, RAY_AUTH_MODE="disabled")
    assert "asks: False" in output
    assert "the Ray cluster that was started here asks for no token" in output
    assert "joined: 0" in output and "asks for no token: who reaches its ports" in output.partition("cluster at ")[2]


def test_a_cluster_that_asks_for_a_token_is_taken_without_a_word(tmp_path):
    output = run_driver(TOKEN, RAY_AUTH_MODE="token")
    assert "asks: True" in output and "joined: 0" in output and "asks for no token" not in output
