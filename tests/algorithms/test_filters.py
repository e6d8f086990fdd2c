"""Filters by hand: which groups vary, which are neither too easy nor too hard."""

import torch

from coalign.algorithms.group_filters import solve_rate, varied

GROUP = torch.tensor([4, 4, 7, 7, 9, 9, 9])


def test_a_group_of_equal_rewards_does_not_vary_whatever_their_value():
    reward = torch.tensor([0.1, 0.1, 0.0, 1.0, 0.7, 0.7, 0.7])
    assert varied(reward, GROUP).tolist() == [False, False, True, True, False, False, False]


def test_continuous_rewards_count_by_their_standard_deviation():
    reward = torch.tensor([0.50, 0.52, 0.0, 0.4, 3.0, 3.0, 3.3])
    # Population deviations: 0.01, 0.2, 0.1414.
    assert varied(reward, GROUP).all()
    assert varied(reward, GROUP, min_std=0.011).tolist() == [False, False, True, True, True, True, True]
    assert varied(reward, GROUP, min_std=0.15).tolist() == [False, False, True, True, False, False, False]


def test_rewards_far_from_zero_do_not_blur():
    reward = torch.tensor([1e6, 1e6, 1e6, 1e6 + 1, 5.0, 5.0, 5.0])
    assert varied(reward, GROUP).tolist() == [False, False, True, True, False, False, False]


def test_the_groups_need_not_be_neighbours_in_order():
    assert varied(torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([8, 2, 2, 8])).tolist() == [False, True, True, False]


def test_solve_rate_includes_its_bounds():
    reward = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.5])
    assert solve_rate(reward, GROUP, low=0.5, high=0.7).tolist() == [True, True, False, False, True, True, True]
    assert solve_rate(reward, GROUP, low=0.0, high=0.5).tolist() == [True, True, True, True, False, False, False]
    assert solve_rate(reward, GROUP, low=1.0, high=1.0, solved=0.5).tolist() == [False] * 4 + [True] * 3
