"""The pool: groups stay whole, leave in order, and not too old."""

import pytest
import torch

from coalign.cluster.batch_ref import BatchRef
from coalign.data.batch import Batch
from coalign.engine.rollouts.pool import GroupPool, count_groups
from tests.cluster.threads import store_batch


def stored(*groups: int) -> BatchRef:
    """One row of one token for each entry; its token is the group."""
    group = torch.tensor(groups)
    return store_batch(Batch(torch.ones(len(groups)), {"tokens": group.int()}, {"group": group}))


def taken(pool: GroupPool, groups: int | None, version: int = 0) -> list[int]:
    return pool.take(groups, version).fetch()["tokens"].tolist()


def test_the_oldest_groups_leave_first_and_whole():
    pool = GroupPool(max_age=0)
    pool.add(stored(1, 1, 2, 2, 2), 0)
    pool.add(stored(3, 3, 4), 0)
    assert len(pool) == 4
    assert taken(pool, 3) == [1, 1, 2, 2, 2, 3, 3]
    assert len(pool) == 1
    assert taken(pool, 5) == [4]
    with pytest.raises(RuntimeError, match="no group"):
        pool.take(1, 0)


def test_rows_of_one_stored_batch_are_read_from_it_once():
    pool = GroupPool(max_age=3)
    pool.add(stored(1, 1, 2, 2, 3), torch.tensor([0, 1, 2]))
    assert [ready.version for ready in pool.entries()] == [0, 1, 2]
    assert len(pool.take(None, 2).payloads) == 1


def test_groups_beyond_the_age_are_dropped_and_counted():
    pool = GroupPool(max_age=1)
    pool.add(stored(1, 1, 2, 3, 3), torch.tensor([0, 0, 1]))
    assert pool.expire(1) == []
    assert count_groups(pool.expire(2)) == 2
    assert taken(pool, None, 2) == [3, 3]


def test_a_restored_pool_goes_on():
    pool, copy = GroupPool(2), GroupPool(2)
    pool.add(stored(1, 2, 2, 3), 5)
    pool.take(1, 5)
    copy.restore(pool.entries())
    assert copy.expire(7) == [] and taken(copy, 1, 7) == [2, 2]
    assert count_groups(copy.expire(8)) == 1


def test_rows_without_groups_count_one_by_one():
    pool = GroupPool(0)
    pool.add(store_batch(Batch(torch.ones(3), {"tokens": torch.arange(3).int()})), 0)
    assert taken(pool, 2) == [0, 1]


def test_a_group_that_is_too_old_and_was_not_dropped_is_a_bug():
    pool = GroupPool(max_age=1)
    pool.add(stored(1), 0)
    with pytest.raises(AssertionError):
        pool.take(1, 2)
