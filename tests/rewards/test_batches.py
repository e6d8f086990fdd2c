"""Gathering single calls into batches: sizes, order, failures, giving up."""

import asyncio

import pytest

from coalign.rewards.batcher import CallBatcher


def collect(items, *, size=4, at_once=1, run=None):
    """The results of all items, submitted together, and the batches that were run."""
    ran = []

    async def negated(batch):
        ran.append(batch)
        await asyncio.sleep(0)
        return [-item for item in batch]

    async def main():
        batches = CallBatcher(run or negated, size=size, at_once=at_once)
        return await asyncio.gather(*map(batches, items), return_exceptions=True)

    return asyncio.run(main()), ran


def test_what_comes_together_goes_together_in_order():
    results, ran = collect(range(10))
    assert results == [-i for i in range(10)]
    assert ran == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_what_comes_while_a_batch_runs_goes_with_the_next_one():
    async def main():
        ran, begun, release = [], asyncio.Event(), asyncio.Event()

        async def run(batch):
            ran.append(batch)
            begun.set()
            await release.wait()
            return batch

        batches = CallBatcher(run, size=8, at_once=1)
        first = asyncio.create_task(batches("a"))
        await begun.wait()
        rest = [asyncio.create_task(batches(item)) for item in "bcd"]
        await asyncio.sleep(0.01)
        assert batches.waiting == 3 and ran == [["a"]]
        release.set()
        assert [await task for task in (first, *rest)] == list("abcd")
        return ran

    assert asyncio.run(main()) == [["a"], ["b", "c", "d"]]


@pytest.mark.parametrize("at_once", [1, 3])
def test_no_more_batches_at_once_than_allowed(at_once):
    running, most = 0, 0

    async def run(batch):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return batch

    results, _ = collect(range(40), size=2, at_once=at_once, run=run)
    assert results == list(range(40)) and most == at_once


def test_an_exception_among_the_results_is_its_callers_alone():
    async def run(batch):
        return [KeyError(item) if item == 1 else item for item in batch]

    results, _ = collect(range(3), run=run)
    assert results[0] == 0 and isinstance(results[1], KeyError) and results[2] == 2


def test_what_run_raises_is_everybodys_of_that_batch():
    async def run(batch):
        if 0 in batch:
            raise OSError("down")
        return batch

    results, _ = collect(range(4), size=2, run=run)
    assert [type(result) for result in results] == [OSError, OSError, int, int]


def test_a_batch_nobody_waits_for_is_cancelled_and_one_with_somebody_goes_on():
    async def main():
        ended, begun = [], asyncio.Event()

        async def run(batch):
            begun.set()
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise
            ended.append("finished")
            return batch

        batches = CallBatcher(run, size=2, at_once=1)
        one, other = (asyncio.create_task(batches(item)) for item in "ab")
        await begun.wait()
        one.cancel()
        assert await other == "b" and ended == ["finished"]
        begun.clear()
        both = [asyncio.create_task(batches(item)) for item in "ab"]
        waiting = asyncio.create_task(batches("c"))
        await begun.wait()
        for task in (*both, waiting):
            task.cancel()
        await asyncio.sleep(0.01)
        assert ended == ["finished", "cancelled"] and batches.waiting == 0
        assert await batches("d") == "d"

    asyncio.run(main())
