import math

import pytest
import torch

from coalign.algorithms.divergence import AdaptiveKL, FixedKL, estimate_kl


def test_values_worked_by_hand():
    logprobs, ref = torch.tensor([-1.0, -1.0, -2.0]), torch.tensor([-1.0, -2.0, -1.0])  # d = 0, 1, -1
    assert estimate_kl(logprobs, ref, "k1").tolist() == [0.0, 1.0, -1.0]
    assert estimate_kl(logprobs, ref, "k2").tolist() == [0.0, 0.5, 0.5]
    # e^-1 - 1 + 1 = 0.367879; e^1 - 1 - 1 = 0.718282
    assert estimate_kl(logprobs, ref).tolist() == pytest.approx([0.0, 0.367879, 0.718282], abs=1e-6)
    # e^d - 1 - d is about d²/2: 5e-9 for d = 1e-4, lost in float32 if e^d were rounded first.
    assert estimate_kl(torch.tensor([-1e-4]), torch.tensor([0.0])).item() == pytest.approx(5e-9, rel=0.01)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradcheck(estimator):
    d = torch.tensor([-5.0, -0.3, 0.0, 0.4, 8.0, 30.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: estimate_kl(x, torch.zeros(6, dtype=torch.float64), estimator), (d,))


def test_extreme_log_ratios_stay_finite():
    logprobs = torch.tensor([-1000.0, 0.0], requires_grad=True)
    values = estimate_kl(logprobs, torch.tensor([0.0, -1000.0]))
    values.sum().backward()
    assert values.tolist() == pytest.approx([math.exp(10) - 11, 999.0])
    assert logprobs.grad.tolist() == [0.0, 1.0]  # held; and 1 - e^-1000


def test_adaptive_follows_the_paper():
    controller = AdaptiveKL(coef=0.1, target=6.0, horizon=1000)
    controller.update(6.6, samples=100)  # error 0.1: 0.1 * (1 + 0.1 * 100 / 1000)
    assert controller.coef == pytest.approx(0.101)
    controller.update(600.0, samples=100)  # error held at 0.2: 0.101 * 1.02
    assert controller.coef == pytest.approx(0.10302)
    controller.update(-3.0, samples=100)  # held at -0.2: 0.10302 * 0.98
    assert controller.coef == pytest.approx(0.1009596)
    fixed = FixedKL(coef=0.05)
    fixed.update(100.0, samples=10)
    assert fixed.coef == 0.05
    fixed.load_state_dict(controller.state_dict())
    assert fixed.coef == controller.coef
