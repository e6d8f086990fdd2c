import torch
from pytest import approx

from coalign.engine.evaluator import pass_at_k, score
from coalign.types import Moments, merge_stats


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
    stats = score(reward, group, mask, prompts=2, samples=4)
    assert stats["mean@4"].value == approx(5 / 8)
    assert stats["pass@1"].value == approx((1 / 4 + 1) / 2)
    assert stats["pass@2"].value == approx((1 / 2 + 1) / 2)
    assert stats["pass@4"].value == approx(1.0)
    assert stats["response_tokens"].value == approx(2.0)


def test_partial_credit_is_not_solved():
    stats = score(torch.tensor([0.5, 0.9]), torch.tensor([0, 0]), torch.ones(2, dtype=torch.bool), prompts=1, samples=2)
    assert stats["mean@2"].value == approx(0.7)
    assert stats["pass@2"].value == 0.0


def test_samples_that_failed_are_wrong_and_counted():
    """Of 4 samples of each of 3 prompts: one is right and two are lost, all are lost, one is wrong and three lost."""
    reward, group = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([-1, -1, -3])
    stats = score(reward, group, torch.ones(3, dtype=torch.bool), prompts=3, samples=4)
    assert stats["samples/count"].value == 3 and stats["samples/dropped"].value == 9
    assert stats["mean@4"].value == stats["mean"].value == approx(1 / 3)
    assert stats["pass@1"].value == approx((1 / 4) / 3)
    assert stats["pass@2"].value == approx((1 / 2) / 3)
    assert stats["pass@4"].value == approx(1 / 3)


def test_batches_with_failures_weigh_as_much_as_others():
    full = score(torch.ones(4), torch.zeros(4), torch.ones(4, dtype=torch.bool), prompts=1, samples=4)
    lost = score(torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.bool), prompts=3, samples=4)
    merged = merge_stats([full, lost])
    assert set(full) == set(lost) and merged["pass@4"].value == approx(1 / 4)


def test_a_deviation_of_batches_is_that_of_all_values():
    """Rewards of 0 in one batch and of 1 in another deviate by one half, and not, as each batch alone, by 0."""
    merged = merge_stats([{"std": Moments.of(torch.zeros(8))}, {"std": Moments.of(torch.ones(8))}])
    assert merged["std"].value == approx(0.5)
