"""GPG, OPO, TOPR's baseline, pass@k and GiGPO: by hand, by other ways to the same numbers, and at the edges."""

import math
from functools import partial
from itertools import combinations

import pytest
import torch

from coalign.algorithms.advantages import fixed_baseline, gigpo, gpg, opo, pass_at_k
from coalign.data.batch import Batch

T = torch.tensor
ON = T([True] * 4)
ALONE = torch.arange(4)  # each sequence has one trained token


def rewards(*values):
    return T(values, dtype=torch.float32)


def test_the_fixed_baseline_worked_by_hand():
    out = fixed_baseline(rewards(1, 0), T([True, False, True]), T([0, 0, 1]), baseline=0.25)
    assert out["advantages"].tolist() == [0.75, 0.0, -0.25]
    assert out["advantages/mean"].value == 0.25


class TestGpg:
    def test_worked_by_hand(self):
        # Group 1 (1, 0) varies, group 2 (1, 1) does not: α = 4 / 2, and deviations of ±½ become ±1.
        out = gpg(rewards(1, 0, 1, 1), T([1, 1, 2, 2]), ON, ALONE)
        assert out["advantages"].tolist() == [1.0, -1.0, 0.0, 0.0]
        assert out["advantages/alpha"].value == 2.0 and out["groups/zero_std"].value == 0.5
        # The standard deviation of (1, 0) is √½: 2 · ½ / √½.
        out = gpg(rewards(1, 0, 1, 1), T([1, 1, 2, 2]), ON, ALONE, scale="std")
        assert out["advantages"].tolist() == pytest.approx([math.sqrt(2), -math.sqrt(2), 0, 0], abs=1e-5)

    def test_no_gradient_at_all(self):
        out = gpg(rewards(1, 1, 0, 0), T([1, 1, 2, 2]), ON, ALONE)
        assert out["advantages"].tolist() == [0.0] * 4


class TestOpo:
    def test_worked_by_hand(self):
        # Lengths 1 and 3, rewards 1 and 0: the baseline is 1/4. A prompt token does not count.
        out = opo(rewards(1, 0), T([5, 5]), T([False, True, True, True, True]), T([0, 0, 1, 1, 1]))
        assert out["advantages"].tolist() == [0.0, 0.75, -0.25, -0.25, -0.25]

    def test_a_response_without_trained_tokens_has_no_weight(self):
        out = opo(rewards(1, 0, 5), T([0, 0, 0]), T([True, False, True]), T([0, 1, 2]))
        assert out["advantages"].tolist() == [-2.0, 0.0, 2.0]
        assert opo(rewards(1, 0), T([0, 0]), T([False, False]), T([0, 1]))["advantages"].tolist() == [0.0, 0.0]


class TestPassAtK:
    @pytest.mark.parametrize("right", range(7))
    @pytest.mark.parametrize("k", range(1, 7))
    def test_it_is_the_mean_over_all_subsets(self, right, k):
        values = [1.0] * right + [0.0] * (6 - right)
        subsets = {s: float(any(values[i] for i in s)) for s in combinations(range(6), k)}
        mean = sum(subsets.values()) / len(subsets)
        std = math.sqrt(mean * (1 - mean))
        out = pass_at_k(rewards(*values), T([0] * 6), T([True] * 6), torch.arange(6), k=k)
        for i in range(6):
            own = [value for s, value in subsets.items() if i in s]
            expected = (sum(own) / len(own) - mean) / std if std else 0.0
            assert out["advantages"][i].item() == pytest.approx(expected, abs=1e-6)
        assert out["pass@k"].value == pytest.approx(mean)

    def test_small_groups_and_other_rewards(self):
        out = pass_at_k(rewards(1, 0, 0, 1), T([0, 1, 1, 1]), ON, ALONE, k=2)  # a group of one sample: no subset of two
        assert out["advantages"][0] == 0 and out["advantages"][1:].any() and out["pass@k"].value == pytest.approx(2 / 3)
        # A threshold for rewards that are not 0 and 1.
        out = pass_at_k(rewards(0.6, 0.4, 0.1, 0.2), T([0] * 4), ON, ALONE, k=2, solved=0.5)
        assert out["pass@k"].value == pytest.approx(1 / 2)


class TestGigpo:
    # Two episodes of two turns in group 4. Turns of two tokens, others' tokens between. Both begin in state 5, and go
    # on to 7 and 9. Only the last turn of the first one earns something: 1.
    SEGMENT = T([0] * 7 + [1] * 6)
    MASK = T([c == "1" for c in "0110110" + "110011"])
    STATES = T([0, 5, 0, 0, 7, 0, 0, 5, 0, 0, 0, 9, 0])
    EARNED = T([0.0] * 5 + [1.0] + [0.0] * 7)

    def run(self, **settings):
        settings = {"scale": "none", "gamma": 0.5, "turn_coef": 2.0} | settings
        return gigpo(rewards(1, 0), self.EARNED, self.STATES, T([4, 4]), self.MASK, self.SEGMENT, **settings)

    def test_worked_by_hand(self):
        # Episodes: ±½. Returns from state 5: 0.5 · 1 and 0, so ±¼, twice; 7 and 9 were met once.
        out = self.run()
        assert out["advantages"].tolist() == [0, 1, 1, 0, 0.5, 0.5, 0, -1, -1, 0, 0, -0.5, -0.5]
        assert out["turns/alone"].value == 0.5 and out["turns/group"].value == pytest.approx(4 / 3)

    def test_scaled_by_the_standard_deviations(self):
        # (½, -½) has √½: ±1/√2. (½, 0) has √⅛: ±¼/√⅛ = ±1/√2, too.
        a = 1 / math.sqrt(2)
        out = self.run(scale="std", turn_coef=1.0)
        assert out["advantages"].tolist() == pytest.approx(
            [0, 2 * a, 2 * a, 0, a, a, 0, *[-2 * a] * 2, 0, 0, -a, -a], abs=1e-5
        )

    def test_states_of_other_groups_are_others(self):
        out = gigpo(rewards(1, 0), self.EARNED, self.STATES, T([4, 8]), self.MASK, self.SEGMENT, gamma=0.5)
        assert out["advantages"].tolist() == [0.0] * 13 and out["turns/alone"].value == 1.0

    def test_an_episode_may_come_back_to_a_state(self):
        # One episode in state 3 twice, rewards 0 and 2, gamma 0.5: returns 1 and 2, mean 1.5.
        out = gigpo(rewards(2), T([0.0, 2.0]), T([3, 3]), T([0]), ON[:2], T([0, 0]), scale="none", gamma=0.5)
        assert out["advantages"].tolist() == [-0.5, 0.5]

    def test_an_episode_that_is_not_trained_on_compares_with_nobody(self):
        mask = self.MASK & (self.SEGMENT == 0)
        out = gigpo(rewards(1, 0), self.EARNED, self.STATES, T([4, 4]), mask, self.SEGMENT, scale="none")
        assert out["turns/alone"].value == 1.0 and out["advantages"][1] == 0.5

    def test_no_tokens(self):
        out = gigpo(rewards(1), T([0.0]), T([0]), T([0]), T([False]), T([0]))
        assert out["advantages"].tolist() == [0.0]


FUNCTIONS = {"gpg": gpg, "opo": opo, "pass_at_k": partial(pass_at_k, k=2), "gigpo": gigpo}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_order_of_arrival_changes_nothing(name):
    """Sequences in another order, groups torn apart: the same advantages, each at its token."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 9, (12,), generator=generator)
    total = int(lengths.sum())
    begins = torch.zeros(total, dtype=torch.int64)
    begins[lengths.cumsum(0) - lengths] = torch.randint(1, 3, (12,), generator=generator)
    batch = Batch(
        lengths,
        {"loss_mask": torch.ones(total, dtype=torch.bool), "turn_states": begins}
        | {"token_rewards": torch.rand(total, generator=generator), "place": torch.arange(total)},
        {"group": torch.arange(12) // 4, "reward": (torch.rand(12, generator=generator) * 3).floor()},
    )

    def compute(batch):
        columns = {"token_rewards": batch["token_rewards"], "turn_states": batch["turn_states"]}
        columns = columns if name == "gigpo" else {}
        mask, segment = batch["loss_mask"], batch.segment
        return FUNCTIONS[name](
            reward=batch["reward"], group=batch["group"], loss_mask=mask, segment=segment, **columns
        )["advantages"]

    known = compute(batch)
    assert known.any()
    other = batch.select(torch.randperm(12, generator=generator))
    torch.testing.assert_close(compute(other), known[other["place"]])
