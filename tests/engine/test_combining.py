"""Rewards on a common scale and summed, by hand."""

import pytest
import torch

from coalign.engine.reward import _RewardTerm, combine
from coalign.types import Moments

VALUES = torch.tensor([[1.0, 3.0, 5.0, 7.0], [0.0, 1.0, 1.0, 0.0]])
GROUP = torch.tensor([4, 4, 9, 9])


def near(values):
    return pytest.approx(values, abs=1e-4)


def test_normalise_then_clip_then_weigh():
    # a: mean 4, std √5; b: mean 1/2 and std 1/2 in both groups
    terms = [_RewardTerm("a", 2.0, "batch", clip=1.0), _RewardTerm("b", 0.5, "group")]
    first = 1 / 5**0.5
    expected = near([-2.0 - 0.5, -2 * first + 0.5, 2 * first + 0.5, 2.0 - 0.5])
    assert combine(VALUES, GROUP, terms, {}).tolist() == expected
    assert combine(VALUES, GROUP, [_RewardTerm("a", clip=4.0), _RewardTerm("b")], {}).tolist() == [1.0, 4.0, 5.0, 4.0]


def test_groups_may_lie_in_any_order():
    order = torch.tensor([2, 0, 3, 1])
    terms = [_RewardTerm("a", 1.0, "group"), _RewardTerm("b", 3.0, "group", clip=0.5)]
    shuffled = combine(VALUES[:, order], GROUP[order], terms, {})
    assert torch.equal(shuffled, combine(VALUES, GROUP, terms, {})[order])


def test_running_moments_are_those_that_are_given():
    seen = {"a": Moments(count=4.0, mean=2.0, squares=16.0)}  # a standard deviation of 2
    terms = [_RewardTerm("a", 1.0, "running", clip=2.0), _RewardTerm("b", 0.0)]
    assert combine(VALUES, GROUP, terms, seen).tolist() == near([-0.5, 0.5, 1.5, 2.0])
    with pytest.raises(ValueError, match=r"reward 'a': there are no running moments.*score samples before"):
        combine(VALUES, GROUP, terms, {"a": Moments()})


@pytest.mark.parametrize("how", ["batch", "group", "running"])
def test_equal_values_are_worth_nothing(how):
    same = torch.full((1, 4), 0.1)
    assert combine(same, GROUP, [_RewardTerm("a", 1e3, how)], {"a": Moments.of(same[0])}).tolist() == near([0.0] * 4)


def test_a_term_without_weight_may_lack_values():
    lacking = torch.stack([VALUES[0], torch.full((4,), float("nan"))])
    terms = [_RewardTerm("a"), _RewardTerm("b", 0.0, "batch")]
    assert combine(lacking, GROUP, terms, {}).tolist() == VALUES[0].tolist()


def test_of_no_sequences_there_is_nothing():
    for how in ("none", "batch", "group"):
        assert len(combine(VALUES[:1, :0], GROUP[:0], [_RewardTerm("a", 1.0, how)], {})) == 0
    assert Moments.of(torch.zeros(0)) == Moments()


def test_moments_of_parts_add_up_to_those_of_the_whole():
    values = 1e6 + torch.arange(7.0)
    together = Moments.of(values[:3]) + Moments.of(values[3:])
    assert together.count == 7 and together.mean == pytest.approx(1e6 + 3) and together.std == pytest.approx(2.0)
