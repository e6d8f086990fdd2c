import math
from dataclasses import replace

import pytest
import torch

from coalign.algorithms.losses.preference import APOZeroUnpairedLoss, KTOLoss
from tests.algorithms.responses import responses

T = torch.tensor


def sigmoid(z):
    return 1 / (1 + math.exp(-z))


# r = 2, -1, 0.5
ROWS, REF = [[-1.0, -2.0], [-2.0, -1.0, -1.5], [-1.0]], [[-2.5, -2.5], [-1.0, -1.5, -1.0], [-1.5]]
X = responses(ROWS, ref=REF, group=[0, 1, 2], preference=[1, 0, 0], reference_point=[0.5] * 3)


class TestKTO:
    def test_worked_by_hand(self):
        out = KTOLoss(beta=0.5, desirable_weight=2.0, undesirable_weight=1.5)(X)
        expected = [2 * (1 - sigmoid(0.5 * 1.5)), 1.5 * (1 - sigmoid(0.5 * 1.5)), 1.5 * 0.5]
        assert out.value.tolist() == pytest.approx(expected)
        stats = {"rewards/chosen": 1.0, "rewards/rejected": -0.125, "logps/chosen": -3.0, "logps/rejected": -2.75}
        stats |= {"accuracy": 2.5 / 3, "kl": 0.5}  # the third lies on the reference point
        assert {name: stat.value for name, stat in out.stats.items()} == pytest.approx(stats)

    def test_the_reference_point_of_apo_zero_is_0(self):
        out = APOZeroUnpairedLoss(beta=0.5)(X)
        assert out.value.tolist() == pytest.approx([1 - sigmoid(1), sigmoid(-0.5), sigmoid(0.25)])
        without = replace(X, columns={"preference": X.columns["preference"]})
        assert APOZeroUnpairedLoss(beta=0.5)(without).value.tolist() == out.value.tolist()

    @pytest.mark.parametrize("kind", [0.0, 1.0])
    def test_one_kind_only(self, kind):
        logprobs = X.logprobs.clone().requires_grad_()
        columns = dict(X.columns) | {"preference": torch.full((3,), kind)}
        out = KTOLoss()(replace(X, logprobs=logprobs, columns=columns))
        out.value.sum().backward()
        assert (logprobs.grad < 0).all() if kind else (logprobs.grad > 0).all()
        absent = "rejected" if kind else "chosen"
        assert out.stats[f"rewards/{absent}"].count == 0

    def test_no_gradient_through_the_reference_point(self):
        point = T([0.5] * 3, dtype=torch.float64)
        logprobs = X.logprobs.clone().requires_grad_()
        columns = dict(X.columns) | {"reference_point": point}
        assert torch.autograd.gradcheck(
            lambda p: KTOLoss(desirable_weight=1.3)(replace(X, logprobs=p, columns=columns)).value, (logprobs,)
        )

    @pytest.mark.parametrize("gap", [-5000.0, 5000.0])
    def test_extreme_log_ratios_stay_finite(self, gap):
        logprobs = T([gap, -gap], requires_grad=True)
        x = responses([[0.0], [0.0]], ref=[[0.0], [0.0]], preference=[1, 0], reference_point=[0.0, 0.0])
        out = KTOLoss()(replace(x, logprobs=logprobs))
        out.value.sum().backward()
        assert out.value.isfinite().all() and logprobs.grad.isfinite().all()
