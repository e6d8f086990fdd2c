import torch
from pytest import approx

from coalign.engine.evaluator import pass_at_k, score


def test_pass_at_k_by_hand():
    assert pass_at_k(correct=0, n=4, k=4) == 0.0
    assert pass_at_k(correct=1, n=4, k=1) == approx(1 / 4)
    # Two of four right: a pair misses both in 1 of 6 ways.
    assert pass_at_k(correct=2, n=4, k=2) == approx(5 / 6)
    assert pass_at_k(correct=4, n=4, k=1) == 1.0


def test_score_over_groups():
    reward = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    group = torch.tensor([-1, -1, -1, -1, -2, -2, -2, -2])
    mask = torch.ones(16, dtype=torch.bool)
    stats = score(reward, group, mask, torch.repeat_interleave(torch.arange(8), 2))
    assert stats["mean@4"].value == approx(5 / 8)
    assert stats["pass@1"].value == approx((1 / 4 + 1) / 2)
    assert stats["pass@2"].value == approx((1 / 2 + 1) / 2)
    assert stats["pass@4"].value == approx(1.0)
    assert stats["response_tokens"].value == approx(2.0)


def test_partial_credit_is_not_solved():
    stats = score(torch.tensor([0.5, 0.9]), torch.tensor([0, 0]), torch.ones(2, dtype=torch.bool), torch.arange(2))
    assert stats["mean@2"].value == approx(0.7)
    assert stats["pass@2"].value == 0.0
