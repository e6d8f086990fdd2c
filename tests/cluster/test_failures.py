"""Whatever fails: one error with the place and the traceback, everything else ended, nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from coalign.cluster.future import WorkerError
from coalign.config.schema import ModelConfig
from coalign.roles import Context
from tests.cluster.conftest import ON_RAY_SLOW, find_pid, wait_gone


def broken(tokens):
    raise KeyError("no such thing")


def test_the_first_error_ends_every_other_call(make, prompts):
    """It names the call and the place, and has the traceback."""
    cluster = make({"judge": {"module": "SumModule"}, "slow": {"module": "RewardLikeModule"}})
    for model in cluster.models.values():
        model.ready.result()
    slow = cluster.models["slow"].sleep(20.0)
    waiting = cluster.models["slow"].forward_step(prompts)
    failed = cluster.models["judge"].fail(prompts)
    dependent = cluster.apply(broken, prompts, failed)
    begun = time.monotonic()
    errors = []
    for future in (slow, waiting, failed, dependent, cluster.models["judge"].forward_step(prompts)):
        with pytest.raises(WorkerError) as caught:
            future.result()
        errors.append(caught.value)
    assert time.monotonic() - begun < 15.0
    assert len(set(map(id, errors))) == 1  # one cause, one error
    text = str(errors[0])
    assert text.startswith("judge.fail failed in judge") and "ValueError: as asked" in text
    assert 'raise ValueError("as asked")' in text  # the worker's own traceback
    assert isinstance(errors[0].cause, ValueError)


def test_a_failed_save_ends_that_call_only(cluster, prompts):
    with pytest.raises(WorkerError, match="No space left on device") as caught:
        cluster.models["judge"].save("/somewhere").result()
    assert caught.value.cause.errno == 28
    assert len(cluster.models["judge"].forward_step(prompts).result()) == 7


def spawn_unloadable(cluster):
    config = ModelConfig(module="tests.cluster.modules:UnloadableModule")
    return cluster.spawn("bad", config, Context(model="bad", threads=1)).anything()


def wait_too_long(cluster):
    cluster.models["judge"].threads().result()
    cluster.deadlines.limit = 0.5
    return cluster.models["judge"].sleep(20.0)


@ON_RAY_SLOW
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda cluster, prompts: cluster.apply(broken, prompts), r"broken failed in .*KeyError: 'no such thing'"),
        (
            lambda cluster, prompts: wait_too_long(cluster),
            r"judge.sleep failed in judge.*no answer within 0.5 s \(runtime.call_timeout\)",
        ),
        (lambda cluster, prompts: spawn_unloadable(cluster), r"bad.setup failed in bad.*FileNotFoundError"),
        (
            lambda cluster, prompts: cluster.models["judge"].gnerate(prompts),
            "'SumModule' object has no attribute 'gnerate'",
        ),
    ],
    ids=["function", "time", "loading", "method"],
)
def test_a_call_that_fails_is_named(make, prompts, call, message):
    cluster = make({"judge": {"module": "SumModule"}})
    future, started_at = call(cluster, prompts), time.monotonic()
    with pytest.raises(WorkerError, match=message):
        future.result()
    assert time.monotonic() - started_at < 15.0  # the call that takes too long would take 20


@ON_RAY_SLOW
def test_after_shutdown_calls_fail_modules_were_closed_and_actors_have_ended(make, tmp_path):
    cluster = make({"mark": {"module": "MarkModule", "load": str(tmp_path / "closed")}})
    [pid] = cluster.models["mark"].run(find_pid).result()
    assert (pid == os.getpid()) == cluster.store.in_process and psutil.pid_exists(pid)
    cluster.shutdown()
    assert (tmp_path / "closed").exists()
    with pytest.raises(RuntimeError, match="the cluster has been shut down"):
        cluster.models["mark"].anything().result()
    wait_gone([pid] if pid != os.getpid() else [])


RUN = """
import sys
from coalign.cluster.choice import start_cluster
from coalign.config.schema import ModelConfig, RunConfig, RuntimeConfig
from coalign.roles import Context

config = ModelConfig(module="tests.cluster.modules:SumModule")
runtime = RuntimeConfig(cluster="ray", threads=1)
with start_cluster(RunConfig(algorithm="none", models={"judge": config}, runtime=runtime)) as cluster:
    judge = cluster.spawn("judge", config, Context(model="judge", threads=1))
    print("pid", judge.process().result(), flush=True)
    if sys.argv[1] == "fail":
        judge.fail().result()
    judge.sleep(60.0).result()
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["fail", "kill"])
def test_a_run_that_ends_badly_leaves_no_process(end):
    """An error, or kill -9 of the driver: Ray, started for this run, goes with it."""
    driver = subprocess.Popen(
        [sys.executable, "-c", RUN, end], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not (line := driver.stdout.readline()).startswith("pid"):
        assert driver.poll() is None, driver.stderr.read()
    family = psutil.Process(driver.pid).children(recursive=True)
    assert int(line.split()[1]) in [process.pid for process in family]
    # Ray's two agents notice only after a while (up to a minute) that the raylet was killed; everything else at once.
    family = [process for process in family if end != "kill" or "Agent" not in "".join(process.cmdline())]
    if end == "kill":
        driver.kill()
    errors = driver.communicate(timeout=60)[1]
    assert driver.returncode != 0
    if end == "fail":
        assert errors.count("ValueError: as asked") <= 3 and "judge.fail failed in judge, replica 0" in errors
    wait_gone([process.pid for process in family])
