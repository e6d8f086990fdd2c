"""Rollouts as discrete events: hand-worked runs, conservation of samples, and what staleness never does."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coalign_plan.job import LengthDistribution
from coalign_plan.simulation import ReplicaSimulation, SequenceGroup, StepRules, simulate_steps


@dataclass(frozen=True)
class FlatPrices:
    """A decode step of one second whatever the batch, a prefill of none, and one byte a token."""

    cache_bytes: float = 1e9

    def sequence_bytes(self, context: float) -> float:
        return context

    def decode_seconds(self, sequences: float, context: float) -> float:
        return 1.0

    def prefill_seconds(self, tokens: float, length: float) -> float:
        return 0.0


@dataclass(frozen=True)
class LoadedPrices(FlatPrices):
    """A decode step that takes longer with more sequences and longer contexts."""

    def decode_seconds(self, sequences: float, context: float) -> float:
        return 1.0 + 0.01 * sequences + 1e-4 * context

    def prefill_seconds(self, tokens: float, length: float) -> float:
        return 1e-3 * tokens


def simulate(batch, rules, prices=None, max_sequences=1e9):
    return simulate_steps(ReplicaSimulation(prices or FlatPrices(), max_sequences), batch, rules)


def test_a_batch_lasts_as_long_as_its_longest_response():
    steps = simulate([(3, 10, 5), (1, 10, 20)], StepRules(needed=4, train_seconds=7, sync_seconds=2))
    assert steps.generation == pytest.approx(20)
    assert steps.period == pytest.approx(20 + 7 + 2)
    assert steps.replica_busy == pytest.approx(20 / 29)


def test_sequences_without_room_wait():
    """Room for two of four sequences at once: two waves."""
    steps = simulate([(4, 0, 10)], StepRules(needed=4, train_seconds=0), max_sequences=2)
    assert steps.generation == pytest.approx(20)
    narrow = simulate([(4, 0, 10)], StepRules(needed=4, train_seconds=0), FlatPrices(cache_bytes=20))
    assert narrow.generation >= 20 - 1e-9


def test_a_full_cache_sends_sequences_back_and_loses_none():
    replica = ReplicaSimulation(FlatPrices(cache_bytes=100), 1e9)
    replica.submit([SequenceGroup(5, 0, 1, 30)])
    while replica.has_work:
        replica.advance()
        used = sum(group.count * group.context for group in replica.running)
        assert used <= 100 + 5
    assert replica.complete[0] == pytest.approx(5)


def test_one_step_ahead_takes_the_longer_of_both():
    batch = [(3, 10, 5), (1, 10, 20)]
    slow = simulate(batch, StepRules(needed=4, train_seconds=50, sync_seconds=2, staleness=1))
    assert slow.period == pytest.approx(52)
    fast = simulate(batch, StepRules(needed=4, train_seconds=5, sync_seconds=2, staleness=1))
    assert fast.period == pytest.approx(22, rel=0.1)
    assert 0 < fast.staleness <= 1


def test_more_batches_in_flight_hide_the_longest_response():
    """One response in a hundred is twenty times as long. In turns, each step waits for it; if it is carried, none."""
    batch = [(99, 10, 5), (1, 10, 100)]
    rules = StepRules(needed=100, train_seconds=10, carries=True)
    periods = [simulate(batch, replace(rules, staleness=staleness)).period for staleness in (0, 1, 2, 4, 8)]
    assert periods[0] == pytest.approx(110)
    assert periods == sorted(periods, reverse=True)
    assert periods[-1] < 30


def test_oversampling_takes_what_is_complete_first():
    batch = [(9, 10, 5), (1, 10, 100)]
    all_of_them = simulate(batch, StepRules(needed=10, train_seconds=1))
    some = simulate([(1.2 * n, p, r) for n, p, r in batch], StepRules(needed=10, train_seconds=1, oversample=1.2))
    assert all_of_them.generation == pytest.approx(100)
    assert some.generation == pytest.approx(5)
    assert some.dropped == pytest.approx(1.2)  # the long ones; 0.8 short ones wait for the next step


def test_a_sync_without_carrying_waits_for_what_runs():
    batch = [(99, 10, 5), (1, 10, 100)]
    rules = StepRules(needed=100, train_seconds=10, staleness=3, in_order=False)
    assert simulate(batch, rules).period > simulate(batch, replace(rules, carries=True)).period


LENGTHS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 500), st.integers(1, 2000)), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(
    batch=LENGTHS, staleness=st.sampled_from([0, 0.5, 1, 2, 3]), carries=st.booleans(), in_order=st.booleans(),
    train=st.floats(0, 5000), oversample=st.sampled_from([1.0, 1.5]), room=st.integers(1, 64),
)  # fmt: skip
def test_no_sample_is_lost(batch, staleness, carries, in_order, train, oversample, room):
    needed = sum(count for count, _, _ in batch)
    rules = StepRules(
        needed=needed, train_seconds=train, sync_seconds=1, staleness=staleness, carries=carries, in_order=in_order,
        oversample=oversample,
    )  # fmt: skip
    offered = [(count * oversample, prompt, response) for count, prompt, response in batch]
    steps = simulate(offered, rules, LoadedPrices(cache_bytes=5000), room)
    assert steps.admitted == pytest.approx(steps.trained + steps.dropped + steps.unfinished, rel=1e-6)
    assert steps.trained == pytest.approx(steps.steps * needed)
    assert steps.unfinished >= -1e-6
    assert steps.period >= train - 1e-6
    assert 0 <= steps.replica_busy <= 1


@settings(max_examples=40, deadline=None)
@given(batch=LENGTHS, train=st.floats(1, 3000))
def test_staleness_is_never_slower(batch, train):
    needed = sum(count for count, _, _ in batch)
    rules = StepRules(needed=needed, train_seconds=train, sync_seconds=1, carries=True)
    periods = [simulate(batch, replace(rules, staleness=s), LoadedPrices()).period for s in (0, 1, 3)]
    assert periods[1] <= periods[0] * 1.001
    assert periods[2] <= periods[1] * 1.05  # the steps that are counted are few, and not quite alike


@settings(max_examples=40, deadline=None)
@given(mean=st.floats(10, 5000), ratio=st.floats(1.0, 30), count=st.integers(2, 100_000))
def test_lengths_have_their_mean_and_maximum(mean, ratio, count):
    shares = LengthDistribution(mean, mean * ratio).shares(count)
    assert sum(share for share, _ in shares) == pytest.approx(1)
    assert sum(share * length for share, length in shares) == pytest.approx(mean, rel=0.01)
    assert all(1 <= length <= mean * ratio * (1 + 1e-9) for _, length in shares)
    assert [length for _, length in shares] == sorted(length for _, length in shares)


def test_lengths_of_a_file(tmp_path):
    file = tmp_path / "lengths.txt"
    file.write_text("10\n30\n20\n")
    lengths = LengthDistribution.parse(str(file))
    assert (lengths.mean, lengths.maximum) == (20, 30)
    assert lengths.shares(3)[-1][1] == 30
    assert LengthDistribution.parse("100,400") == LengthDistribution(100, 400)
    file.write_text("10\nlong\n")
    with pytest.raises(ValueError, match="line 2 is 'long'"):
        LengthDistribution.parse(str(file))
    with pytest.raises(ValueError, match="MEAN,MAX"):
        LengthDistribution.parse("100")
    with pytest.raises(ValueError, match="not above the maximum"):
        LengthDistribution.parse("400,100")
