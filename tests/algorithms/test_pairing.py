import math

import pytest
import torch

from coalign.algorithms.comparisons import all_pairs, best_worst

T = torch.tensor
NAN = math.nan


def paired(fn, reward, group):
    out = fn(T(reward), T(group))
    return out["preference"].tolist(), {name: out[f"pairs/{name}"].value for name in ("count", "tied", "margin")}


def test_the_best_meets_the_worst():
    preference, stats = paired(best_worst, [1.0, 3.0, 2.0, 0.5, -1.0], [7, 7, 7, 4, 4])
    assert preference == pytest.approx([1.0, 3.0, NAN, 0.5, -1.0], nan_ok=True)
    assert stats == {"count": 2, "tied": 0, "margin": pytest.approx((2.0 + 1.5) / 2)}


def test_of_equals_the_first():
    preference, stats = paired(best_worst, [0.0, 1.0, 0.0, 1.0, 1.0], [0] * 5)
    assert preference == pytest.approx([0.0, 1.0, NAN, NAN, NAN], nan_ok=True)
    assert stats["count"] == 1


@pytest.mark.parametrize("fn", [best_worst, all_pairs])
def test_a_tie_is_no_pair_and_is_counted(fn):
    """Also a group of one response: the others of its prompt failed. A reward of 0 is a reward."""
    preference, stats = paired(fn, [2.0, 2.0, 5.0, 0.0, -1.0], [1, 1, 2, 3, 3])
    assert preference == pytest.approx([NAN, NAN, NAN, 0.0, -1.0], nan_ok=True)
    assert stats == {"count": 1, "tied": 2, "margin": 1.0}


def test_every_pair_with_different_rewards():
    preference, stats = paired(all_pairs, [1.0, 3.0, 1.0, 2.0], [5] * 4)
    assert preference == [1.0, 3.0, 1.0, 2.0]
    # 3 > 1, 3 > 1, 3 > 2, 2 > 1, 2 > 1
    assert stats == {"count": 5, "tied": 0, "margin": pytest.approx((2 + 2 + 1 + 1 + 1) / 5)}


def test_the_margin_is_over_the_worst_of_the_group():
    out = best_worst(T([1.0, 3.0, 2.0, 0.5]), T([0, 0, 0, 1]))
    assert out["margin"].tolist() == [0.0, 2.0, 1.0, 0.0]


def test_groups_are_runs_of_equal_neighbours():
    """Negative ids (evaluation), ids that come back after another group."""
    preference, _ = paired(best_worst, [1.0, 0.0, 4.0, 5.0, 9.0, 8.0], [-3, -3, 2, 2, -3, -3])
    assert preference == [1.0, 0.0, 4.0, 5.0, 9.0, 8.0]


@pytest.mark.parametrize("fn", [best_worst, all_pairs])
def test_nothing_to_compare(fn):
    out = fn(torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    assert out["preference"].shape == (0,)
    assert out["pairs/count"].value == out["pairs/tied"].value == 0
