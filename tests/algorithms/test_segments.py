import pytest
import torch

from coalign.algorithms.segments import discounted_sum, segment_count, segment_sum

SEGMENT = torch.tensor([0, 0, 0, 2, 2])


def test_counts_and_sums():
    assert segment_count(SEGMENT, 4).tolist() == [3, 0, 2, 0]
    assert segment_sum(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), SEGMENT, 4).tolist() == [6.0, 0.0, 9.0, 0.0]


def test_discounted_sum_worked_by_hand():
    # 3; 2 + 1.5 = 3.5; 1 + 1.75 = 2.75 | 5; 4 + 2.5 = 6.5
    got = discounted_sum(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), SEGMENT, 0.5)
    assert got.tolist() == [2.75, 3.5, 3.0, 6.5, 5.0]


@pytest.mark.parametrize("values", [[], [7.0]])
def test_nothing_to_add(values):
    column = torch.tensor(values)
    assert torch.equal(discounted_sum(column, torch.zeros(len(values), dtype=torch.int64), 0.9), column)
