"""Functions of people in processes of their own: hangs, exits and crashes cost the samples that met them, no more."""

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time

import pytest

from coalign.backends.scorers.reward_functions import build_reward_function
from coalign.config.functions import name_object
from coalign.config.schema import RewardConfig
from coalign.processes import function_process
from coalign.processes.function_process import _ProcessConnection
from coalign.processes.function_program import CALL, HEADER, VALUE
from coalign.rewards.calls import RewardCaller, RewardFailure
from tests.rewards.samples import sample

try:
    import uvloop
except ImportError:
    uvloop = None

HERE = "packages.graders.tests.hostile:"
SAMPLES = [sample("bad" if i == 3 else f"good {i}", group=i // 2, index=i % 2, answer="1") for i in range(8)]


@pytest.fixture
def caller():
    caller = RewardCaller()
    yield caller
    caller.close()


def build(fn, **settings):
    name = HERE + fn if isinstance(fn, str) else name_object(fn)
    return build_reward_function(RewardConfig(**{"fn": name, "retries": 0, "timeout": 20.0} | settings), "reward.0")


def score(caller, function, samples=SAMPLES):
    (outcomes,) = caller.score([function], samples)
    return [one.reason if isinstance(one, RewardFailure) else one["reward"] for one in outcomes]


@pytest.mark.parametrize(
    ("fn", "timeout", "reason"),
    [
        ("backtracks", 0.3, "timeout"),
        ("exits", 20.0, "died"),
        ("crashes", 20.0, "died"),
        ("raises", 20.0, "bug"),
        ("waits", 0.3, "timeout"),
    ],
)
def test_one_bad_sample_fails_alone(caller, fn, timeout, reason):
    function, start = build(fn, timeout=timeout), time.monotonic()
    assert score(caller, function) == [1.0] * 3 + [reason] + [1.0] * 4
    assert score(caller, function, SAMPLES[:3]) == [1.0] * 3
    assert time.monotonic() - start < 15


@pytest.mark.parametrize(("fn", "reason"), [("backtracks_async", "timeout"), ("exits_async", "died")])
def test_what_an_async_call_takes_with_it_is_repeated(caller, monkeypatch, fn, reason):
    monkeypatch.setattr(function_process, "_GRACE", 0.2)
    assert score(caller, build(fn, timeout=0.5)) == [1.0] * 3 + [reason] + [1.0] * 4


def test_a_death_is_described_with_its_cause(caller):
    for fn, expected in (("exits", "exited with code 1"), ("crashes", "was ended by SIGSEGV")):
        ((outcome,),) = caller.score([build(fn, retries=1)], SAMPLES[3:4])
        assert str(outcome).startswith("died: ProcessDied: ") and expected in str(outcome)


def test_what_needs_more_memory_than_it_may_fails_alone_and_says_so(caller):
    assert score(caller, build("hoards", process_memory_mb=300)) == [1.0] * 3 + ["raised"] + [1.0] * 4
    ((outcome,),) = caller.score([build("hoards", process_memory_mb=300)], SAMPLES[3:4])
    assert str(outcome).startswith(
        "raised: MemoryError: the function needs more memory than process_memory_mb allows: 300 MB"
    )
    assert score(caller, build("hoards"), SAMPLES[3:4]) == [1.0]
    ((died,),) = caller.score([build("crashes", process_memory_mb=300)], SAMPLES[3:4])
    assert str(died).endswith("SIGSEGV during a call (its process_memory_mb is 300)")


def test_calls_that_were_sent_ahead_go_to_another_process(caller):
    """A fast function has many calls under way when one ends its process: that one alone has failed."""
    samples = [sample("bad" if i % 100 == 99 else "good", index=i) for i in range(400)]
    expected = ["died" if i % 100 == 99 else 1.0 for i in range(400)]
    assert score(caller, build("exits"), samples) == expected


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, *([] if uvloop is None else [uvloop.new_event_loop])])
def test_answers_are_read_though_a_call_could_not_be_sent_any_more(new_loop):
    """The process answers, ends, and the parent writes to it before it looks for answers."""
    heard = []

    async def exchange():
        ended = asyncio.Event()
        connection = _ProcessConnection(lambda *message: heard.append(message), ended.set)
        ours, theirs = socket.socketpair()
        connection.keep_socket(ours)
        await asyncio.get_running_loop().create_connection(lambda: connection, sock=ours)
        for number in (1, 2):
            theirs.sendall(HEADER.pack(6, number, VALUE) + b"answer")
        theirs.close()
        for number in (3, 4):
            connection.send(number, CALL, b"x" * 100)
            connection.flush()
        await asyncio.wait_for(ended.wait(), 10)

    with contextlib.closing(new_loop()) as loop:
        loop.run_until_complete(exchange())
    assert heard == [(1, VALUE, b"answer"), (2, VALUE, b"answer")]


def test_arguments_that_cannot_be_sent_fail_alone(caller):
    good, bad = sample("good"), sample("good", lock=threading.Lock())
    assert score(caller, build("exits"), [good, bad, good]) == [1.0, "bug", 1.0]


def test_errors_keep_their_class_and_their_traceback(caller):
    ((outcome,),) = caller.score([build("raises")], SAMPLES[3:4])
    assert isinstance(outcome.error, LookupError) and "hostile.py" in str(outcome.error.__cause__)
    ((odd,), (unsent,)) = caller.score([build("raises_oddly"), build("returns_odd")], SAMPLES[:1])
    assert str(odd).startswith("raised: RuntimeError: OddError: odd (packages/graders/tests/hostile.py:")
    assert unsent.reason == "bug"


def test_a_process_starts_without_torch_and_reads_tensors_when_asked(caller):
    assert score(caller, build("has_torch")) == [0.0] * 8
    assert score(caller, build("reads_everything", timeout=0.5), SAMPLES[:1]) == [14.0]  # an import costs no deadline


def test_a_class_has_one_instance_until_its_process_dies(caller):
    function = build("Counter", start=2)
    assert score(caller, function, SAMPLES[:3]) == [3.0, 4.0, 5.0]
    assert score(caller, function, SAMPLES[2:5]) == [6.0, "died", 3.0]
    with pytest.raises(ValueError, match="start is -1"):
        caller.start([build("Counter", start=-1)])


def test_functions_that_wait_get_more_processes(caller):
    function = build("process")
    assert os.getpid() not in score(caller, function) and len(set(score(caller, function))) > 1


def test_groups_and_objects_are_sent_too(caller):
    word = "good"
    assert score(caller, build("shortest"), SAMPLES[2:4]) == [0.0, 1.0]
    assert score(caller, build(lambda one: float(word in one.response)), SAMPLES[2:4]) == [1.0, 0.0]
    assert os.getpid() not in score(caller, build(lambda one: os.getpid()), SAMPLES[:1])


def test_an_object_that_cannot_be_sent_runs_here_and_says_so(caller, caplog):
    lock = threading.Lock()

    def locks(sample):
        with lock:
            return os.getpid()

    with caplog.at_level(logging.WARNING):
        assert score(caller, build(locks), SAMPLES[:1]) == [os.getpid()]
    assert "'locks' runs in this process, which it can hang or end" in caplog.text


def test_functions_of_the_package_stay_in_this_process():
    for fn in ("exact_match", "coalign_graders.answers:exact_match", "coalign.rewards.rules:tags"):
        assert build_reward_function(RewardConfig(fn=fn), "reward.0").pool is None


def test_what_is_short_of_memory_loses_its_function_first(caller):
    assert score(caller, build("oom_score"), SAMPLES[:1]) == [1000.0]


def test_processes_end_with_their_caller():
    caller = RewardCaller()
    (pid,) = score(caller, build(lambda one: os.getpid()), SAMPLES[:1])
    caller.close()
    for _ in range(200):
        if not os.path.exists(f"/proc/{int(pid)}"):
            return
        time.sleep(0.02)
    raise AssertionError(f"process {pid} still lives")


def test_a_failing_service_is_waited_for_in_a_process_too(caller, tmp_path):
    function = build("busy_service", log=str(tmp_path / "calls"), patience=30.0)
    assert score(caller, function, SAMPLES[:1]) == [1.0]
    assert caller.service_failures == {"busy_service": 3}
