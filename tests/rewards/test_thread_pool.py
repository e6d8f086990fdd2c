"""Plain functions in threads: order, deadlines a call, going on after a thread that hangs."""

import asyncio
import subprocess
import sys
import threading
import time

from coalign.rewards.thread_pool import _THREADS, ThreadPool
from coalign.threads import CallTimeout


def run(call, arguments, seconds=5.0):
    async def main():
        return await ThreadPool().run(call, arguments, seconds)

    return asyncio.run(main())


def test_results_keep_their_order_whatever_finishes_first():
    def call(i):
        time.sleep(0.02 * (i % 3))
        return -i

    assert run(call, list(range(40))) == [(-i, None) for i in range(40)]
    assert run(call, []) == []


def test_the_deadline_is_that_of_a_call_not_of_its_thread():
    # 50 calls of 0.03 s for each thread take longer than a second together, and none of them does alone.
    calls = range(50 * _THREADS)
    assert run(lambda i: time.sleep(0.03) or i, calls, seconds=1.0) == [(i, None) for i in calls]


def test_after_a_hang_the_other_calls_are_still_made_and_a_late_result_is_ignored():
    release = threading.Event()

    def call(i):
        if i % 10 == 0:
            release.wait(30)
        return i

    results = run(call, range(40), seconds=0.2)
    late = [i for i, (_, error) in enumerate(results) if isinstance(error, CallTimeout)]
    release.set()
    assert late == [0, 10, 20, 30]
    assert all(results[i] == (i, None) for i in range(40) if i % 10)


def test_what_a_call_raises_is_its_result():
    def call(i):
        raise (SystemExit, StopIteration, ValueError, KeyboardInterrupt)[i]

    assert [type(error) for _, error in run(call, range(4))] == [
        SystemExit,
        StopIteration,
        ValueError,
        KeyboardInterrupt,
    ]


def test_a_thread_that_hangs_does_not_keep_the_process_alive():
    code = (
        "import asyncio, threading; from coalign.rewards.thread_pool import ThreadPool\n"
        "[(_, error)] = asyncio.run(ThreadPool().run(lambda _: threading.Event().wait(), [0], 0.1))\n"
        "print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "no answer within 0.1 s\n"
