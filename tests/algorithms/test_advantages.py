import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coalign.algorithms.advantages import gae, group, reinforce_pp, reinforce_pp_baseline, remax, reverse_kl, rloo

T = torch.tensor


def column(*values, dtype=torch.float32):
    return T(values, dtype=dtype)


def mask(bits):
    return T([b == "1" for b in bits])


class TestGae:
    def test_worked_by_hand(self):
        # prompt, then three response tokens with rewards 0, 0, 1 and values 0.5, 0.4, 0.8; gamma 0.9, lam 0.5.
        # delta_3 = 1 - 0.8 = 0.2; delta_2 = 0.9 * 0.8 - 0.4 = 0.32; delta_1 = 0.9 * 0.4 - 0.5 = -0.14
        # A_3 = 0.2; A_2 = 0.32 + 0.45 * 0.2 = 0.41; A_1 = -0.14 + 0.45 * 0.41 = 0.0445
        given = column(0, 0, 0, 1), column(9, 0.5, 0.4, 0.8), mask("0111"), T([0, 0, 0, 0])
        out = gae(*given, gamma=0.9, lam=0.5, whiten=False)
        assert out["advantages"].tolist() == pytest.approx([0, 0.0445, 0.41, 0.2])
        assert out["returns"].tolist() == pytest.approx([0, 0.5445, 0.81, 1.0])
        assert out["returns/mean"].value == pytest.approx((0.5445 + 0.81 + 1.0) / 3)

    @settings(max_examples=30, deadline=None, derandomize=True)
    @given(
        lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5),
        seed=st.integers(0, 999),
        gamma=st.sampled_from([0.0, 0.9, 1.0]),
        lam=st.sampled_from([0.0, 0.95, 1.0]),
    )
    def test_equals_the_plain_recursion(self, lengths, seed, gamma, lam):
        generator = torch.Generator().manual_seed(seed)
        total = sum(lengths)
        rewards, values = torch.randn(2, total, generator=generator)
        on = torch.rand(total, generator=generator) < 0.7
        segment = torch.repeat_interleave(torch.arange(len(lengths)), T(lengths))
        got = gae(rewards, values, on, segment, gamma=gamma, lam=lam, whiten=False)["advantages"]
        want = torch.zeros(total, dtype=torch.float64)
        for i in range(len(lengths)):
            following, advantage = 0.0, 0.0
            for t in reversed((on & (segment == i)).nonzero().flatten().tolist()):
                delta = rewards[t].item() + gamma * following - values[t].item()
                following, advantage = values[t].item(), delta + gamma * lam * advantage
                want[t] = advantage
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)

    def test_whitening_is_over_the_response_tokens_of_the_rollout(self):
        out = gae(torch.randn(50), torch.randn(50), torch.arange(50) % 3 > 0, torch.arange(50) // 10)
        kept = out["advantages"][torch.arange(50) % 3 > 0]
        assert kept.mean().item() == pytest.approx(0, abs=1e-6)
        assert kept.var(unbiased=False).item() == pytest.approx(1, abs=1e-5)
        raw = gae(torch.zeros(4), torch.zeros(4), mask("1111"), T([0, 0, 1, 1]))
        assert raw["advantages"].tolist() == [0.0] * 4  # equal values: nothing to scale

    def test_long_sequences_do_not_lose_precision(self):
        # gamma = lam = 1 and no values: A_t is the number of tokens left, 1 reward each.
        one, zero = torch.ones(5000), torch.zeros(5000)
        out = gae(one, zero, one.bool(), zero.long(), lam=1.0, whiten=False)
        assert torch.equal(out["advantages"], torch.arange(5000, 0, -1.0))


class TestGroup:
    SEGMENT, MASK = T([0, 0, 0, 1, 1, 2, 2, 3]), mask("01101011")

    def test_worked_by_hand(self):
        # Rewards 1, 0, 0, 1: mean 0.5; unbiased variance 4 * 0.25 / 3 = 1/3, std 0.57735: 0.5 / 0.57735 = 0.866025
        out = group(column(1, 0, 0, 1), T([4, 4, 4, 4]), self.MASK, self.SEGMENT, eps=0.0)
        a = 0.866025
        assert out["advantages"].tolist() == pytest.approx([0, a, a, 0, -a, 0, -a, a], abs=1e-6)
        # population: std 0.5
        out = group(column(1, 0, 0, 1), T([4, 4, 4, 4]), self.MASK, self.SEGMENT, unbiased=False, eps=0.5)
        assert out["advantages"].tolist() == pytest.approx([0, 0.5, 0.5, 0, -0.5, 0, -0.5, 0.5])

    def test_scaled_by_the_batch(self):
        # Groups (1, 0) and (4, 3) have deviations ±0.5; all four have mean 2 and variance (1 + 4 + 4 + 1) / 3.
        out = group(column(1, 0, 4, 3), T([4, 4, 7, 7]), mask("1111"), T([0, 1, 2, 3]), scale="batch", eps=0.0)
        a = 0.5 / math.sqrt(10 / 3)
        assert out["advantages"].tolist() == pytest.approx([a, -a, a, -a])
        # A group of equal rewards has 0 beside one that varies; all equal, everything is 0.
        out = group(column(1, 0, 4, 4), T([4, 4, 7, 7]), mask("1111"), T([0, 1, 2, 3]), scale="batch")
        assert out["advantages"].tolist()[2:] == [0.0, 0.0] and out["advantages"][0] > 0
        out = group(column(0.1, 0.1), T([0, 1]), mask("11"), T([0, 1]), scale="batch")
        assert out["advantages"].tolist() == [0.0, 0.0]

    def test_ragged_groups_in_any_order(self):
        # Group 9 holds samples 0 and 3 (mean 2), group 1 sample 1 alone, group 5 sample 2 alone.
        out = group(column(1, 8, 0, 3), T([9, 1, 5, 9]), self.MASK, self.SEGMENT, scale="none")
        assert out["advantages"].tolist() == [0, -1, -1, 0, 0, 0, 0, 1]
        assert out["groups/zero_std"].value == pytest.approx(2 / 3)

    @pytest.mark.parametrize("function", [group, rloo, reinforce_pp_baseline])
    def test_equal_rewards_give_exactly_nothing(self, function):
        out = function(column(0.1, 0.1, 0.1, 0.1), T([0, 0, 0, 0]), self.MASK, self.SEGMENT)
        assert out["advantages"].tolist() == [0.0] * 8
        assert out["groups/zero_std"].value == 1.0

    @pytest.mark.parametrize("function", [group, rloo, reinforce_pp_baseline])
    def test_a_group_of_one_and_an_empty_response(self, function):
        # Sequence 1 has no trained token, yet its reward is part of the baseline of group 0.
        out = function(column(1.0, 0.0, 5.0), T([0, 0, 1]), mask("0100001"), T([0, 0, 1, 1, 2, 2, 2]))
        assert out["advantages"].isfinite().all()
        assert (out["advantages"][1] > 0) and out["advantages"][2:6].tolist() == [0.0] * 4

    @pytest.mark.parametrize("function", [group, rloo, reinforce_pp_baseline])
    def test_no_tokens_at_all(self, function):
        out = function(column(1.0, 0.0), T([0, 0]), mask("00"), T([0, 1]))
        assert out["advantages"].tolist() == [0.0, 0.0]

    @pytest.mark.parametrize("function", [group, rloo, reinforce_pp_baseline])
    @settings(max_examples=20, deadline=None, derandomize=True)
    @given(seed=st.integers(0, 9999), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4))
    def test_order_of_sequences_and_names_of_groups_do_not_matter(self, function, seed, sizes):
        draw = random.Random(seed)
        ids = [g for g, n in enumerate(sizes) for _ in range(n)]
        rewards, lengths = [draw.choice([0.0, 0.5, 1.0]) for _ in ids], [draw.randint(1, 4) for _ in ids]
        order = draw.sample(range(len(ids)), len(ids))
        renamed = draw.sample(range(10**12), len(sizes))

        def run(rows, name):
            segment = torch.repeat_interleave(torch.arange(len(rows)), T([lengths[i] for i in rows]))
            on = torch.ones(len(segment), dtype=torch.bool)
            out = function(T([rewards[i] for i in rows]), T([name(ids[i]) for i in rows]), on, segment)["advantages"]
            return dict(zip(rows, out.split([lengths[i] for i in rows]), strict=True))

        plain, shuffled = run(list(range(len(ids))), lambda g: g), run(order, lambda g: renamed[g])
        for i in order:
            torch.testing.assert_close(plain[i], shuffled[i], rtol=1e-6, atol=1e-6)


def test_rloo_worked_by_hand():
    # Rewards 1, 0, 2 against the means of the others: 1 - (0 + 2)/2 = 0; 0 - (1 + 2)/2 = -1.5; 2 - (1 + 0)/2 = 1.5
    out = rloo(column(1, 0, 2), T([3, 3, 3]), mask("111"), T([0, 1, 2]))
    assert out["advantages"].tolist() == pytest.approx([0, -1.5, 1.5])


def test_reinforce_pp_worked_by_hand():
    # Rewards -0.1, -0.2, (tool), 1.0 with gamma 0.5: G = 1; -0.2 + 0.5 = 0.3; -0.1 + 0.15 = 0.05. Second sequence: 0.4
    arguments = (column(0, -0.1, -0.2, 9, 1.0, 0.4), mask("011011"), T([0, 0, 0, 0, 0, 1]))
    out = reinforce_pp(*arguments, gamma=0.5, whiten=False)
    assert out["advantages"].tolist() == pytest.approx([0, 0.05, 0.3, 0, 1.0, 0.4])
    # Mean 0.4375; variance (0.3875² + 0.1375² + 0.5625² + 0.0375²) / 4 = 0.121719
    white = reinforce_pp(*arguments, gamma=0.5)["advantages"]
    want = [(g - 0.4375) / math.sqrt(0.121719) for g in (0.05, 0.3, 1.0, 0.4)]
    assert white[mask("011011")].tolist() == pytest.approx(want, abs=1e-4)


def test_reinforce_pp_baseline_worked_by_hand():
    # Deviations ±0.5; the first response has 3 tokens, the second 1: mean 0.25, variance 0.1875 (std 0.433013).
    out = reinforce_pp_baseline(column(1, 0), T([0, 0]), mask("1111"), T([0, 0, 0, 1]))
    a, b = 0.25 / 0.433013, -0.75 / 0.433013
    assert out["advantages"].tolist() == pytest.approx([a, a, a, b], abs=1e-5)


def test_remax_worked_by_hand():
    # 1 - 0.25 over two tokens around a tool's, 0 - 0.5 over one; the response in between has no trained token.
    out = remax(column(1, 9, 0), column(0.25, 9, 0.5), mask("01010000"), T([0, 0, 0, 0, 1, 1, 2, 2]))
    assert out["advantages"].tolist() == [0, 0.75, 0, 0.75, 0, 0, 0, 0]
    out = remax(column(1, 0), column(0.25, 0.5), mask("1011"), T([0, 0, 0, 1]))
    assert out["advantages"].tolist() == [0.75, 0, 0.75, -0.5]
    assert out["baseline/mean"].value == 0.375
    assert out["advantages/mean"].value == pytest.approx((0.75 + 0.75 - 0.5) / 3)


class TestReverseKl:
    # log π - log π_teacher: 0.5, (a tool's token), -1.0 | 2.0
    ARGUMENTS = (column(9, -1, 9, -2, -1), column(0, -1.5, 0, -1, -3), mask("01011"), T([0, 0, 0, 0, 1]))

    def test_worked_by_hand(self):
        out = reverse_kl(*self.ARGUMENTS)
        assert out["advantages"].tolist() == [0, -0.5, 0, 1.0, -2.0]
        assert out["teacher_kl"].value == pytest.approx(0.5)  # (0.5 - 1 + 2) / 3
        assert reverse_kl(*self.ARGUMENTS, coef=0.1)["advantages"].tolist() == pytest.approx([0, -0.05, 0, 0.1, -0.2])

    def test_discount_skips_masked_tokens_and_stays_in_its_response(self):
        out = reverse_kl(*self.ARGUMENTS, discount=0.5)
        assert out["advantages"].tolist() == [0, -0.5 + 0.5 * 1.0, 0, 1.0, -2.0]

    def test_equal_models_and_empty_responses(self):
        same = column(-1, -2)
        assert reverse_kl(same, same, mask("11"), T([0, 0]))["advantages"].tolist() == [0.0, 0.0]
        assert reverse_kl(same, same, mask("00"), T([0, 1]))["teacher_kl"].count == 0
