"""A run that stands still is told of, with everything that helps to see why."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

from coalign.cluster.future import Call, Future, Outcome, WorkerTask
from coalign.engine.hooks.watchdog import Watchdog, run_watchdog
from coalign.run_files.lock import lock_folder
from coalign.run_files.state import StateFile, read_state
from tests.cluster.threads import thread_cluster


class Calls:
    """A cluster that only says what is under way."""

    def __init__(self, *calls):
        self.calls = list(calls)

    def list_pending_calls(self):
        return self.calls

    def stacks(self):
        return {"driver": "stack of the driver\n", "policy, replica 1": "stack of the replica\n"}


def call(label, *since):
    model, _, method = label.partition(".")
    future = Future(Call(model, method))
    future.monotonic_start = since[0] if since else 0.0
    future.running = [
        WorkerTask(f"policy, replica {i}", Future(Call(None, "")).ended, None, monotonic_start=each)
        for i, each in enumerate(since)
    ]
    return future


def test_a_call_is_reported_once_and_again_after_twice_the_time(tmp_path):
    watchdog = Watchdog(Calls(call("policy.generate", 100.0, 130.0)), tmp_path, StateFile(tmp_path), 60.0)
    assert watchdog.look(159.0) is None
    assert watchdog.look(161.0) == "policy.generate without an answer for 61 s"
    assert watchdog.look(200.0) is None
    assert watchdog.look(225.0) == "policy.generate without an answer for 125 s"


def test_replicas_that_have_answered_are_not_waited_for(tmp_path):
    half = call("policy.generate", 100.0, 150.0)
    half.running[0].meta.set_result(Outcome(None, {}))
    assert Watchdog(Calls(half), tmp_path, StateFile(tmp_path), 60.0).look(200.0) is None


def test_a_run_in_which_nobody_computes_is_reported(tmp_path):
    watchdog = Watchdog(Calls(call("reference.forward_step")), tmp_path, StateFile(tmp_path), 60.0)
    now = time.monotonic()
    assert watchdog.look(now + 50.0) is None
    assert watchdog.look(now + 61.0) == "no process has been busy for 61 s"
    assert watchdog.look(now + 100.0) is None
    watchdog.phase("train")
    assert watchdog.look(time.monotonic() + 50.0) is None


def test_a_clock_that_is_set_is_no_stall(tmp_path, monkeypatch):
    monkeypatch.setattr("coalign.engine.hooks.watchdog._MAX_POLL_SECONDS", 0.01)
    watchdog = Watchdog(Calls(call("policy.generate", time.monotonic())), tmp_path, StateFile(tmp_path), 60.0)
    monkeypatch.setattr(time, "time", lambda: 4e9)
    looks, looked = [], threading.Event()
    monkeypatch.setattr(watchdog, "look", lambda now: looks.append(Watchdog.look(watchdog, now)) or looked.set())
    watchdog.start()
    assert looked.wait(30)
    watchdog.close()
    assert set(looks) == {None}


def test_without_a_limit_nothing_is_reported(tmp_path):
    assert Watchdog(Calls(call("policy.generate", 0.0)), tmp_path, StateFile(tmp_path), None).look(1e9) is None


def test_a_report_names_phase_calls_places_and_files(tmp_path, caplog):
    waiting, busy = call("reference.forward_step"), call("policy.generate", time.monotonic() - 100)
    watchdog = Watchdog(Calls(busy, waiting), tmp_path / "stalls", StateFile(tmp_path), 60.0)
    watchdog.phase("rollout")
    with caplog.at_level(logging.WARNING, "coalign.engine.hooks.watchdog"):
        place = watchdog.report("policy.generate without an answer for 100 s")
    text = caplog.text
    assert "phase `rollout` since" in text and str(place) in text
    assert "policy.generate: at policy, replica 0 since" in text and "(100 s)" in text
    assert "reference.forward_step: waits since" in text
    assert {file.name for file in place.iterdir()} == {"driver.txt", "policy_replica_1.txt", "report.txt"}
    assert (place / "policy_replica_1.txt").read_text() == "stack of the replica\n"


def test_a_stall_of_a_real_call_is_seen_and_the_run_goes_on(tmp_path):
    begun, go_on = threading.Event(), threading.Event()

    def stands_still(module, store):
        begun.set()
        go_on.wait()
        return "done"

    state, models = StateFile(tmp_path), {"judge": {"module": "SumModule"}}
    with lock_folder(tmp_path), thread_cluster(models) as cluster, run_watchdog(cluster, tmp_path, state, 0.2):
        future = cluster.models["judge"].run(stands_still)
        begun.wait()
        while not list(tmp_path.glob("*/driver.txt")):
            time.sleep(0.05)
        assert read_state(tmp_path).status == "stalled" and "judge.stands_still" in read_state(tmp_path).reason
        go_on.set()
        assert future.result() == ["done"]
    [report, *_] = tmp_path.glob("*/report.txt")
    assert "judge.stands_still: at judge, replica 0 since" in report.read_text()
    assert "in stands_still" in (report.parent / "driver.txt").read_text()


def test_a_signal_asks_for_a_report(tmp_path):
    before = signal.getsignal(signal.SIGUSR1)
    with run_watchdog(Calls(), tmp_path, StateFile(tmp_path), None):
        os.kill(os.getpid(), signal.SIGUSR1)
        deadline = time.monotonic() + 30.0
        while not list(tmp_path.glob("*/report.txt")) and time.monotonic() < deadline:
            time.sleep(0.05)
    [report] = tmp_path.glob("*/report.txt")
    assert report.read_text().startswith("asked for (SIGUSR1); phase `start`")
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_report_that_fails_ends_nothing(tmp_path, caplog):
    cluster = Calls()
    cluster.stacks = lambda: 1 / 0
    with run_watchdog(cluster, tmp_path, StateFile(tmp_path), None) as watchdog:
        watchdog.report_now()
        deadline = time.monotonic() + 30.0
        while "failed" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.05)
        assert watchdog._thread.is_alive()
    assert "the report of a stalled run failed" in caplog.text
