import math
from dataclasses import replace

import pytest
import torch

from coalign.algorithms.losses.supervised import ProcessRewardLoss
from coalign.types import LossInput

T = torch.tensor


def judged(logprobs, label):
    logprobs = torch.as_tensor(logprobs, dtype=torch.float64)
    return LossInput(
        segment=torch.zeros(len(logprobs), dtype=torch.int64),
        sequences=1,
        candidate_logprobs=logprobs,
        columns={"label": torch.as_tensor(label, dtype=torch.float64)},
    )


class TestProcessReward:
    # P(+) = 0.3 / (0.3 + 0.1) = 3/4, 1/4 and 1/2: what other tokens get does not matter.
    X = judged([[math.log(0.3), math.log(0.1)], [math.log(0.1), math.log(0.3)], [-7.0, -7.0]], [1, 1, 0])

    def test_hard_labels(self):
        out = ProcessRewardLoss()(self.X)
        assert out.value.tolist() == pytest.approx([-math.log(0.75), -math.log(0.25), math.log(2)])
        assert out.stats["accuracy"].value == pytest.approx(1.5 / 3)
        assert out.stats["positive"].value == pytest.approx(0.5)
        assert out.stats["nll"].value == pytest.approx(out.value.mean().item())

    def test_soft_labels(self):
        x = replace(self.X, columns={"label": T([0.75, 0.25, 0.5], dtype=torch.float64)})
        entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
        out = ProcessRewardLoss()(x)
        assert out.value.tolist() == pytest.approx([entropy, entropy, math.log(2)])
        logprobs = self.X.candidate_logprobs.clone().requires_grad_()
        ProcessRewardLoss()(replace(x, candidate_logprobs=logprobs)).value.sum().backward()
        assert logprobs.grad.abs().max() < 1e-12  # the model says what the labels say

    def test_gradcheck(self):
        logprobs = self.X.candidate_logprobs.clone().requires_grad_()
        x = replace(self.X, columns={"label": T([0.2, 1.0, 0.0])})
        assert torch.autograd.gradcheck(
            lambda p: ProcessRewardLoss()(replace(x, candidate_logprobs=p)).value, (logprobs,)
        )

    def test_extreme_log_probs_stay_finite(self):
        logprobs = T([[0.0, -5000.0], [-5000.0, 0.0]], requires_grad=True)
        out = ProcessRewardLoss()(replace(judged([[0, 0]] * 2, [0, 0]), candidate_logprobs=logprobs))
        out.value.sum().backward()
        assert out.value.tolist() == [5000.0, 0.0] and logprobs.grad.isfinite().all()
