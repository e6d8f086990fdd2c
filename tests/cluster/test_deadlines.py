"""Nothing waits for ever: the deadlines of calls, and the end of a cluster whose threads hang."""

from __future__ import annotations

import threading
import time

import pytest

from coalign.cluster import cluster as base
from coalign.cluster.future import (
    LEAST_SECONDS,
    LOAD_SECONDS,
    LONGEST_TIMES,
    Call,
    CallDeadlines,
    Future,
    WorkerError,
    WorkerTask,
)
from coalign.config.schema import RuntimeConfig
from tests.cluster.threads import thread_cluster

GENERATE = Call("policy", "generate")


def test_by_default_a_deadline_is_ten_times_the_longest_call_of_its_kind():
    deadlines = CallDeadlines(RuntimeConfig().call_timeout)
    assert deadlines.find(GENERATE) == LEAST_SECONDS
    for seconds in (1000.0, 3000.0, 10.0):
        future = Future(GENERATE)
        start = time.monotonic() - seconds
        deadlines.record(GENERATE, [WorkerTask("policy", future.ended, None, monotonic_start=start)])
    assert deadlines.find(GENERATE) == pytest.approx(LONGEST_TIMES * 3000.0, rel=1e-3)
    assert deadlines.find(Call("trainer", "train_step")) == LEAST_SECONDS


def test_a_limit_that_is_set_holds_for_all_calls_but_loading():
    deadlines = CallDeadlines(20.0)
    start = time.monotonic() - 100
    deadlines.record(GENERATE, [WorkerTask("policy", Future(GENERATE).ended, None, monotonic_start=start)])
    assert deadlines.find(GENERATE) == 20.0
    assert deadlines.find(Call("policy", "setup")) == LOAD_SECONDS


def test_without_call_timeout_a_call_that_hangs_ends_too(monkeypatch):
    monkeypatch.setattr("coalign.cluster.future.LEAST_SECONDS", 0.5)
    release = threading.Event()

    def hang(module, store):
        release.wait()

    with thread_cluster({"judge": {"module": "SumModule"}}, call_timeout=None) as cluster:
        text = r"judge.hang failed in judge, replica 0.*no answer within 0.5 s \(runtime.call_timeout; not set: 0.5 s"
        with pytest.raises(WorkerError, match=text):
            cluster.models["judge"].run(hang).result()
        release.set()


def test_threads_that_hang_are_waited_for_together(monkeypatch):
    monkeypatch.setattr(base, "CLOSE_SECONDS", 0.3)
    release = threading.Event()
    with thread_cluster({}) as cluster:
        for number in range(40):
            cluster.call_queue(f"hangs-{number}").submit(release.wait)
        begun = time.monotonic()
        cluster.shutdown()
        assert time.monotonic() - begun < 8.0  # one after another: 12 s
    release.set()


def test_ray_that_does_not_end_is_left(monkeypatch, caplog):
    connection = pytest.importorskip("coalign.cluster.ray.connection")
    release, hooks = threading.Event(), []
    monkeypatch.setattr(connection, "LEAVE_SECONDS", 0.2)
    monkeypatch.setattr(connection.atexit, "unregister", hooks.append)
    connection.end_in_time(lambda: None)
    assert not hooks and not caplog.text
    connection.end_in_time(release.wait)
    assert hooks == [connection.ray.shutdown] and "Ray did not end within 0.2 s" in caplog.text
    release.set()
