import torch

from coalign.algorithms.comparisons import _build_pairs

T = torch.tensor


def test_every_pair_of_a_group_and_none_across_groups():
    pairs = _build_pairs(T([1.0, 0.0, 5.0, 3.0, 2.0, 3.0]), T([0, 0, 1, 2, 2, 2]), 4)
    assert list(zip(pairs.winner.tolist(), pairs.loser.tolist(), strict=True)) == [(0, 1), (3, 4), (5, 4)]
    assert pairs.group.tolist() == [0, 2, 2]
    assert pairs.mean(T([1.0, 2.0, 4.0])).tolist() == [1.0, 0.0, 3.0, 0.0]


def test_agrees_with_a_loop():
    generator = torch.Generator().manual_seed(0)
    group = torch.randint(0, 6, (40,), generator=generator).sort().values
    preference = torch.randint(0, 4, (40,), generator=generator).float()
    pairs = _build_pairs(preference, group, 6)
    expected = [(i, j) for i in range(40) for j in range(40) if group[i] == group[j] and preference[i] > preference[j]]
    assert list(zip(pairs.winner.tolist(), pairs.loser.tolist(), strict=True)) == expected


def test_nothing_to_compare():
    pairs = _build_pairs(torch.zeros(0), torch.zeros(0, dtype=torch.int64), 0)
    assert len(pairs.winner) == 0 and pairs.mean(torch.zeros(0)).shape == (0,)
