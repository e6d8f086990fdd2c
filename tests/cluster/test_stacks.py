"""The stacks of processes that do not answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from coalign.cluster.future import WorkerError
from coalign.cluster.stacks import StackFile, collect_stacks, format_own_stacks
from tests.cluster.conftest import find_pid

STUCK = """
import threading
import time
from coalign.cluster.stacks import listen

def waits_for_ever(lock, say_so):
    say_so()
    lock.acquire()

lock, inside = threading.Lock(), threading.Event()
lock.acquire()
threading.Thread(target=waits_for_ever, args=(lock, inside.set), daemon=True).start()
inside.wait()
listening = listen()
waits_for_ever(lock, lambda: print(listening.pid, listening.file, flush=True))
"""


@pytest.fixture
def stuck():
    process = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, text=True)
    pid, file = map(int, process.stdout.readline().split())
    yield process, StackFile(pid, file)
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_process_that_hangs_tells_its_stacks_and_goes_on(stuck):
    process, listening = stuck
    for _ in range(2):  # each time all of it, and nothing of the time before
        text = collect_stacks({"policy, replica 3": listening})["policy, replica 3"]
        assert text.count("in waits_for_ever") == 2 and text.count("most recent call first") == 2
    assert process.poll() is None


def test_processes_that_cannot_answer_are_said_to_be_so(stuck, monkeypatch):
    process, listening = stuck
    monkeypatch.setattr("coalign.cluster.stacks._PATIENCE", 0.3)
    os.kill(process.pid, signal.SIGSTOP)
    assert collect_stacks({"one": listening}) == {"one": "no answer: the process is stopped, or deep in the kernel\n"}
    process.kill()
    process.wait()
    assert collect_stacks({"one": listening}) == {"one": "the process is gone\n"}


def test_own_stacks_name_the_threads():
    done, begun = threading.Event(), threading.Event()

    def waits():
        begun.set()
        done.wait()

    thread = threading.Thread(target=waits, name="coalign-policy")
    thread.start()
    begun.wait()
    text = format_own_stacks()
    done.set()
    thread.join()
    assert "Thread coalign-policy:" in text and "in waits" in text and "Thread MainThread:" in text


@pytest.mark.slow
def test_every_process_of_a_run_tells_its_stacks_while_it_computes_and_a_killed_one_is_named(make_ray):
    cluster = make_ray({"judge": {"module": "SumModule", "num_process": 2}})
    judge = cluster.models["judge"]
    pids = judge.run(find_pid).result()
    sleeping = judge.sleep(60.0)
    while len(sleeping.running) != 2:
        time.sleep(0.05)
    deadline = time.monotonic() + 30.0
    while not all("in sleep" in cluster.stacks()[f"judge, replica {i}"] for i in range(2)):
        assert time.monotonic() < deadline
    assert "Thread MainThread:" in cluster.stacks()["driver"]
    assert not sleeping.done()
    begun = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"judge.sleep failed in judge, replica 1: worker lost"):
        sleeping.result()
    assert time.monotonic() - begun < 5.0
