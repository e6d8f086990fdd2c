import math

import pytest
import torch

from coalign.algorithms.divergence import importance_weights, mismatch_stats
from coalign.types import EffectiveSize

T = torch.tensor
LN2, LN3 = math.log(2), math.log(3)

# Two responses and an empty one between them: ratios 2, 1/2, 3 and 1/2, 1/2.
OLD = T([-1.0, -1.0, -1.0, -2.0, -2.0], dtype=torch.float64)
ROLLOUT = OLD - T([LN2, -LN2, LN3, -LN2, -LN2], dtype=torch.float64)
SEGMENT = T([0, 0, 0, 2, 2])


def weights(level, **settings):
    return importance_weights(OLD, ROLLOUT, SEGMENT, 3, level=level, **settings)


class TestWorkedByHand:
    def test_token(self):
        assert weights("token", high=5.0)[0].tolist() == pytest.approx([2, 0.5, 3, 0.5, 0.5])
        truncated, stats = weights("token", low=0.6, high=2.5)
        assert truncated.tolist() == pytest.approx([2, 0.6, 2.5, 0.6, 0.6])
        assert stats["is_outside"].value == pytest.approx(4 / 5)
        assert stats["is_weight"].value == pytest.approx((2 + 0.6 + 2.5 + 0.6 + 0.6) / 5)
        masked, stats = weights("token", mode="mask", low=0.6, high=2.5)
        assert masked.tolist() == pytest.approx([2, 0, 0, 0, 0])
        assert stats["is_weight"].value == pytest.approx(2 / 5)

    def test_sequence_is_the_geometric_mean(self):
        # (2 · 1/2 · 3)^(1/3) = 3^(1/3); (1/2 · 1/2)^(1/2) = 1/2
        mean = 3 ** (1 / 3)
        assert weights("sequence")[0].tolist() == pytest.approx([mean] * 3 + [0.5] * 2)
        truncated, _ = weights("sequence", low=0.9, high=1.2)
        assert truncated.tolist() == pytest.approx([1.2] * 3 + [0.9] * 2)
        # A whole sequence leaves; the empty one is no sequence to count.
        masked, stats = weights("sequence", mode="mask", low=0.9, high=1.5)
        assert masked.tolist() == pytest.approx([mean] * 3 + [0] * 2)
        assert (stats["is_outside"].value, stats["is_outside"].count) == (0.5, 2)
        assert stats["is_weight"].value == pytest.approx(mean / 2)

    def test_product(self):
        assert weights("product", high=4.0)[0].tolist() == pytest.approx([3] * 3 + [0.25] * 2)
        assert weights("product", high=2.0)[0].tolist() == pytest.approx([2] * 3 + [0.25] * 2)

    def test_none_weighs_nothing_and_still_measures(self):
        plain, stats = weights("none", low=7.0)  # bounds of weights that nobody uses
        assert plain.tolist() == [1.0] * 5
        assert set(stats) == {"ess"}
        # (2 + 1/2 + 3 + 1/2 + 1/2)² / (5 (4 + 1/4 + 9 + 1/4 + 1/4)) = 42.25 / 68.75
        assert stats["ess"].value == pytest.approx(42.25 / 68.75)

    def test_effective_sample_size_of_sequences(self):
        # 3 and 1/4: 3.25² / (2 (9 + 1/16)), before anything is bounded
        assert weights("product", high=1.0)[1]["ess"].value == pytest.approx(3.25**2 / (2 * 9.0625))

    def test_mismatch(self):
        stats = mismatch_stats(OLD, ROLLOUT)
        assert stats["mismatch"].value == pytest.approx((4 * LN2 + LN3) / 5)
        assert stats["mismatch_max"].value == pytest.approx(LN3)
        # ratio - 1 - ln ratio, under the sampler: 2 - 1 - ln 2; 1/2 - 1 + ln 2 (three times); 3 - 1 - ln 3
        assert stats["mismatch_kl"].value == pytest.approx((1 - LN2 + 3 * (LN2 - 0.5) + 2 - LN3) / 5)
        assert stats["ess"].value == pytest.approx(42.25 / 68.75)
        none = mismatch_stats(OLD[:0], ROLLOUT[:0])
        assert none["mismatch"].count == 0 and (none["mismatch_max"] + stats["mismatch_max"]).value == pytest.approx(
            LN3
        )


@pytest.mark.parametrize("level", ["token", "sequence", "product"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
class TestEveryWeight:
    def test_on_policy_it_is_one(self, level, mode):
        ones, stats = importance_weights(OLD, OLD, SEGMENT, 3, level=level, mode=mode, low=1.0, high=1.0)
        assert ones.tolist() == [1.0] * 5
        assert (stats["ess"].value, stats["is_weight"].value, stats["is_outside"].value) == (1.0, 1.0, 0.0)

    def test_it_is_a_constant(self, level, mode):
        old = OLD.clone().requires_grad_()
        assert not importance_weights(old, ROLLOUT, SEGMENT, 3, level=level, mode=mode)[0].requires_grad

    def test_extremes_stay_finite(self, level, mode):
        far = T([0.0, -1000.0, 0.0, -1000.0])
        got, stats = importance_weights(far, -1000 - far, T([0, 0, 1, 2]), 3, level=level, mode=mode, high=1e30)
        assert got.isfinite().all() and all(math.isfinite(s.value) for s in stats.values())
        assert got[0] == pytest.approx(math.exp(20)) or level != "token"

    def test_nothing_at_all(self, level, mode):
        empty = torch.zeros(0)
        got, stats = importance_weights(empty, empty, empty.long(), 2, level=level, mode=mode)
        assert got.shape == (0,)
        assert math.isnan(stats["ess"].value) and stats["is_weight"].count == 0


def test_effective_sizes_merge_exactly():
    w = T([1.0, 2.0, 3.0, 0.5])
    merged = EffectiveSize.of(w[:1]) + EffectiveSize.of(w[1:])
    assert merged.value == EffectiveSize.of(w).value == pytest.approx(6.5**2 / (4 * 14.25))
    assert math.isnan(EffectiveSize.of(torch.zeros(3)).value)
