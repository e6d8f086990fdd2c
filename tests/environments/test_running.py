"""Many environments at once: one that is slow or breaks concerns nobody else."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time

import pytest

from coalign.environments import loop as environments
from coalign.environments.loop import EnvironmentBatch, EnvironmentBlocked, EnvironmentFunction, EnvironmentLoop
from coalign.services import ServiceError
from coalign.threads import call_in_thread
from coalign.types import Status
from tests.environments.helpers import Script, episode, play


def several(count: int, samples: int = 1):
    return [episode("a", "b", group=i // samples, index=i % samples) for i in range(count)]


async def says_hello(one):
    await one.generate()


def statuses(running):
    return [one.status for each in running.calls for one in each.episodes]


def test_a_crash_ends_its_own_episode_alone():
    async def crashes(one):
        await one.generate()
        if one.group == 1:
            raise KeyError("lost")
        if one.group == 2:
            raise SystemExit(3)  # an agent that calls sys.exit()

    running = play(crashes, *several(4))
    assert statuses(running) == [Status.OK, Status.ERROR, Status.ERROR, Status.OK]
    assert [each.reason for each in running.calls] == ["", "KeyError", "SystemExit", ""]
    assert all(sum(each.episodes[0].rows[0].loss_mask) == 2 for each in running.calls)


@pytest.mark.parametrize("stubborn", [False, True])
def test_time_outside_of_the_policy_is_limited(stubborn):
    async def dawdles(one):
        await one.generate()
        while one.group == 1:
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                if not stubborn:
                    raise

    running = play(dawdles, *several(3), timeout=1.0)
    assert statuses(running) == [Status.OK, Status.ERROR, Status.OK]
    failed = running.calls[1]
    assert failed.reason == "timeout" and "1 s" in str(failed.error)


def test_the_policys_own_time_does_not_count():
    slow = [episode(policy=Script(["a"], delay=1.5), group=i) for i in range(2)]
    running = play(says_hello, *slow, timeout=1.0)
    assert statuses(running) == [Status.OK, Status.OK]
    assert max(each.clock.used for each in running.calls) < 1.0


def test_after_its_end_an_episode_takes_nothing():
    late, heard = [], threading.Event()

    async def goes_on(one):
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            try:
                one.say({"role": "user", "content": "more"})
            except RuntimeError as error:
                late.append(str(error))
            heard.set()
            raise

    play(goes_on, *several(1), timeout=0.1)
    assert heard.wait(60)
    assert late == ["group 0, index 0 has ended"]


def test_environments_run_side_by_side():
    together = asyncio.Barrier(5)

    async def meets(one):
        await together.wait()  # nobody gets on before all are here
        await one.generate()

    assert statuses(play(meets, *several(5))) == [Status.OK] * 5


def test_a_function_in_a_thread_may_take_its_time():
    async def waits(one):
        await one.generate()
        await call_in_thread(time.sleep, 100 if one.group == 0 else 0)

    assert statuses(play(waits, *several(3), timeout=1.0)) == [Status.ERROR, Status.OK, Status.OK]


def test_what_a_thread_raises_rises():
    async def divides(one):
        with pytest.raises(ZeroDivisionError):
            await call_in_thread(lambda: 1 // 0)
        await one.generate()

    assert statuses(play(divides, *several(1))) == [Status.OK]


def test_enough_complete_groups_end_the_others():
    async def unequal(one):
        await one.generate()
        await asyncio.sleep(0 if one.group < 2 else 100)

    running = play(unequal, *several(8, samples=2), min_groups=2)
    assert statuses(running) == [Status.OK] * 4 + [Status.PARTIAL] * 4
    assert statuses(play(says_hello, *several(2), min_groups=0)) == [Status.PARTIAL] * 2


def test_an_environment_of_a_group_gets_all_its_samples():
    seen = []

    async def meets(group):
        seen.append([one.index for one in group])
        await asyncio.gather(*(one.generate() for one in group))

    assert statuses(play(meets, *several(6, samples=3))) == [Status.OK] * 6
    assert seen == [[0, 1, 2], [0, 1, 2]]


def test_who_blocks_the_loop_is_named(monkeypatch):
    monkeypatch.setattr("coalign.environments.loop._GRACE", 0.1)

    async def blocks(one):
        time.sleep(5)  # instead of asyncio.sleep

    with pytest.raises(EnvironmentBlocked, match=r"(?s)must await.*instead of asyncio\.sleep"):
        play(blocks, *several(1), timeout=0.2)


HOLDS = """
import re
from coalign.environments import loop
from tests.environments.helpers import episode, play

async def holds_everything(one):
    re.fullmatch(r"(a+)+b", "a" * 60)

loop._MIN_HOLD_SECONDS = loop._GRACE = 1.0
play(holds_everything, episode(), timeout=1.0)
"""


@pytest.mark.slow
def test_who_holds_the_interpreter_is_named_and_the_process_ends():
    done = subprocess.run([sys.executable, "-c", HOLDS], stderr=subprocess.PIPE, text=True, timeout=100)
    assert done.returncode == -signal.SIGKILL
    assert "environment 'holds_everything', or a function that it calls, has held the interpreter" in done.stderr
    assert "in fullmatch" in done.stderr and "in holds_everything" in done.stderr


def test_a_failing_service_is_waited_for_and_costs_no_time_of_the_environment(monkeypatch):
    monkeypatch.setattr("coalign.environments.loop._GRACE", 0.05)
    back = time.monotonic() + 1.0

    async def service():
        if time.monotonic() < back:
            raise ServiceError("restarting")
        return "5"

    async def asks(one):
        await one.generate()
        one.say({"role": "user", "content": await one.call_service(service)})

    running = play(asks, *several(2), timeout=0.3)
    assert statuses(running) == [Status.OK] * 2
    assert all(call.episodes[0].counts["service_failures"] > 2 for call in running.calls)


def test_a_service_that_stays_away_drops_the_episode():
    async def service():
        raise ServiceError("gone")

    async def asks(one):
        await one.generate()
        await one.call_service(service, 0.3)

    running = play(asks, *several(1))
    assert statuses(running) == [Status.ERROR] and running.calls[0].reason == "ServiceError"


def test_what_is_no_environment_is_refused():
    def plain(episode):
        pass

    async def nothing(*, k=1):
        pass

    with pytest.raises(TypeError, match=r"'plain' is no coroutine: write it as `async def plain\(episode"):
        EnvironmentFunction(plain)
    with pytest.raises(TypeError, match="'nothing' takes no positional argument"):
        EnvironmentFunction(nothing)


def test_nobody_plays_nothing():
    assert play(says_hello).done


def test_a_loop_runs_several_batches_and_the_watch_has_the_limit_of_those_that_run():
    ends = [threading.Event(), threading.Event()]

    async def waits(one):
        while not ends[one.group].is_set():
            await asyncio.sleep(0.01)

    loop = EnvironmentLoop()
    try:
        timeouts = (200.0, 100.0)
        first, second = (
            EnvironmentBatch(loop, {"": EnvironmentFunction(waits, timeout=seconds)}, [episode(group=group)])
            for group, seconds in enumerate(timeouts)
        )
        begun = time.monotonic()
        second.wait(0.2)
        assert time.monotonic() - begun < 5 and not first.done and not second.done
        assert loop._find_limit() == 200 + environments._GRACE
        ends[0].set()
        while not first.done:
            first.wait(0.2)
        assert loop._find_limit() == 100 + environments._GRACE
        ends[1].set()
        while not second.done:
            second.wait()
        assert loop._find_limit() == environments._IDLE_HOLD_SECONDS
    finally:
        loop.close()
