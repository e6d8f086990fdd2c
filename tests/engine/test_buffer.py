import pytest
from hypothesis import given
from hypothesis import strategies as st

from coalign.engine.environment import Buffer


def test_synchronous_training_begins_one_batch_at_a_time():
    begun = []
    buffer = Buffer(max_staleness=0, last=3)
    for version in range(3):
        buffer.fill(version, lambda step: begun.append(step) or step)
        assert begun == list(range(version + 1))
        assert buffer.take(version) == version
    buffer.fill(3, lambda step: pytest.fail("began a batch that nobody will train on"))


@given(st.integers(0, 5), st.integers(1, 12))
def test_every_step_gets_its_batch_and_none_is_staler_than_the_bound(staleness, last):
    versions = {}
    buffer = Buffer(staleness, last)
    current = 0

    def begin(step):
        versions[step] = current
        return step

    for step in range(last):
        current = step
        buffer.fill(step, begin)
        assert len(buffer) == min(staleness + 1, last - step)
        assert buffer.take(step) == step
        assert 0 <= step - versions[step] <= staleness
        # The bound is used, not only kept: once warm, a batch is as far ahead as allowed.
        assert step - versions[step] == min(step, staleness)


def test_a_restored_buffer_goes_on_where_it_was():
    buffer = Buffer(2, last=10)
    buffer.fill(0, lambda step: f"batch {step}")
    assert buffer.take(0) == "batch 0"
    copy = Buffer(2, last=10)
    copy.restore(1, buffer.entries())
    began = []
    copy.fill(1, lambda step: began.append(step) or f"batch {step}")
    assert began == [3]
    assert [copy.take(1), copy.take(2), copy.take(3)] == ["batch 1", "batch 2", "batch 3"]


def test_a_batch_staler_than_the_bound_is_a_bug_and_stops_the_run():
    buffer = Buffer(0, last=5)
    buffer.fill(0, lambda step: step)
    with pytest.raises(AssertionError):
        buffer.take(1)
