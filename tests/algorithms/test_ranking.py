import math
from dataclasses import replace

import pytest
import torch

from coalign.algorithms.losses.supervised import BradleyTerryLoss
from tests.algorithms.responses import responses

T = torch.tensor


def scored(scores, **kwargs):
    x = responses([[0.0]] * len(scores), **kwargs)
    return replace(x, logprobs=None, scores=torch.as_tensor(scores, dtype=torch.float64))


def log_sigmoid(z):
    return -math.log1p(math.exp(-z))


class TestBradleyTerry:
    def test_worked_by_hand(self):
        out = BradleyTerryLoss()(scored([1.0, 0.5, -1.0, 2.0], preference=[1, 0, 0, 1]))
        assert out.value.tolist() == pytest.approx([-log_sigmoid(0.5), -log_sigmoid(3.0)])
        expected = {"accuracy": 1.0, "margin": 1.75, "scores": 0.625, "scores_squared": 6.25 / 4}
        expected |= {"rewards/chosen": 1.5, "rewards/rejected": -0.25}
        assert {name: stat.value for name, stat in out.stats.items()} == pytest.approx(expected)

    def test_margin(self):
        out = BradleyTerryLoss()(scored([1.0, 0.5], preference=[1, 0], margin=[2.0, 0.0]))
        assert out.value.item() == pytest.approx(-log_sigmoid(-1.5))
        assert out.stats["margin"].value == 0.5  # what the model says, not what the data set does

    def test_centring(self):
        out = BradleyTerryLoss(centre_coef=0.01)(scored([1.0, 0.5], preference=[1, 0]))
        assert out.value.item() == pytest.approx(-log_sigmoid(0.5) + 0.01 * 2.25)

    def test_rankings_are_the_mean_over_all_pairs(self):
        x = scored([0.0, 1.0, 3.0, 1.0], group=[0] * 4, preference=[0, 1, 2, 1], margin=[0, 0.5, 1, 0.5])
        z = [1 - 0.5, 3 - 1, 1 - 0.5, 3 - 1 - 0.5, 3 - 1 - 0.5]  # the two with equal preference are not compared
        assert BradleyTerryLoss()(x).value.item() == pytest.approx(-sum(map(log_sigmoid, z)) / 5)

    def test_group_without_pairs(self):
        x = scored([1.0, 2.0, 0.0, 1.0], preference=[1, 1, 1, 0])
        scores = x.scores.clone().requires_grad_()
        value = BradleyTerryLoss(centre_coef=0.1)(replace(x, scores=scores)).value
        value.sum().backward()
        assert value[0] == 0 and scores.grad[:2].tolist() == [0.0, 0.0] and scores.grad[2] < 0

    def test_ties_count_half(self):
        out = BradleyTerryLoss()(scored([1.0, 1.0, 0.0, 1.0], preference=[1, 0, 1, 0]))
        assert out.stats["accuracy"].value == 0.25

    @pytest.mark.parametrize("gap", [-1e6, 1e6])
    def test_extreme_scores_stay_finite(self, gap):
        scores = T([gap, -gap], requires_grad=True)
        out = BradleyTerryLoss()(replace(scored([0.0, 0.0], preference=[1, 0]), scores=scores))
        out.value.sum().backward()
        assert out.value.isfinite().all() and scores.grad.tolist() == ([-1.0, 1.0] if gap < 0 else [0.0, 0.0])

    def test_gradcheck(self):
        x = scored([0.3, -0.2, 1.0, 0.1], group=[0, 0, 0, 1], preference=[1, 0, 2, 0], margin=[0.5, 0, 1, 0])
        scores = x.scores.clone().requires_grad_()
        loss = BradleyTerryLoss(centre_coef=0.1)
        assert torch.autograd.gradcheck(lambda s: loss(replace(x, scores=s)).value, (scores,))
