import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from coalign.algorithms.losses.supervised import DistillationLoss
from coalign.types import LossInput

T = torch.tensor


def given(student, teacher, logprobs=None):
    student, teacher = (torch.as_tensor(t, dtype=torch.float64) for t in (student, teacher))
    return LossInput(
        segment=torch.zeros(len(student), dtype=torch.int64),
        sequences=1,
        logprobs=torch.zeros(len(student), dtype=torch.float64) if logprobs is None else logprobs,
        candidate_logprobs=student,
        columns={"teacher_logprobs": teacher},
    )


def distributions(tokens=6, vocabulary=50, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, tokens, vocabulary, generator=generator, dtype=dtype)
    return (3 * logits).log_softmax(-1)


class TestWorkedByHand:
    # Teacher (0.5, 0.25, rest 0.25), student (0.25, 0.25, rest 0.5).
    X = given([[math.log(0.25), math.log(0.25)]], [[math.log(0.5), math.log(0.25)]])

    def test_forward(self):
        expected = 0.5 * math.log(2) + 0.25 * math.log(0.5)
        assert DistillationLoss()(self.X).value.item() == pytest.approx(expected)

    def test_reverse(self):
        expected = 0.25 * math.log(0.5) + 0.5 * math.log(2)
        assert DistillationLoss(divergence="reverse")(self.X).value.item() == pytest.approx(expected)

    def test_jsd(self):
        # Mixture at β = 0.5: (0.375, 0.25, 0.375)
        kl = 0.5 * math.log(0.5 / 0.375) + 0.25 * math.log(0.25 / 0.375)
        assert DistillationLoss(divergence="jsd")(self.X).value.item() == pytest.approx(kl)  # both halves alike
        # β = 0.1: m = 0.1 teacher + 0.9 student = (0.275, 0.25, 0.475)
        teacher = 0.5 * math.log(0.5 / 0.275) + 0.25 * math.log(0.25 / 0.475)
        student = 0.25 * math.log(0.25 / 0.275) + 0.5 * math.log(0.5 / 0.475)
        value = DistillationLoss(divergence="jsd", jsd_beta=0.1)(self.X).value.item()
        assert value == pytest.approx(0.1 * teacher + 0.9 * student)

    def test_share_of_the_negative_log_likelihood(self):
        x = replace(self.X, logprobs=T([-2.0], dtype=torch.float64))
        kl = DistillationLoss()(x).value.item()
        out = DistillationLoss(kd_coef=0.4)(x)
        assert out.value.item() == pytest.approx(0.6 * 2.0 + 0.4 * kl)
        assert out.stats["kd"].value == pytest.approx(kl) and out.stats["nll"].value == 2.0
        assert out.stats["teacher_tail"].value == pytest.approx(0.25)


class TestCandidates:
    def test_the_whole_vocabulary_in_float32(self):
        student, teacher = distributions(vocabulary=20_000, dtype=torch.float32)
        x = replace(given(student, teacher), candidate_logprobs=student, columns={"teacher_logprobs": teacher})
        for name, (q, p) in {"forward": (student, teacher), "reverse": (teacher, student)}.items():
            exact = F.kl_div(q.double(), p.double(), log_target=True, reduction="none").sum(-1)
            torch.testing.assert_close(DistillationLoss(divergence=name)(x).value, exact, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
    def test_equal_distributions_have_neither_value_nor_gradient(self, divergence):
        logits = torch.randn(4, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
        student = logits.log_softmax(-1)[:, :5]
        value = DistillationLoss(divergence=divergence)(given(student, student.detach())).value
        value.sum().backward()
        assert value.abs().max() < 1e-12 and logits.grad.abs().max() < 1e-9


class TestSafety:
    @pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
    def test_gradcheck(self, divergence):
        generator = torch.Generator().manual_seed(4)
        logits = torch.randn(2, 3, 8, generator=generator, dtype=torch.float64)
        teacher = logits[1].log_softmax(-1)[:, :3]
        leaf = logits[0].clone().requires_grad_()

        def run(leaf):
            student = leaf.log_softmax(-1)
            x = given(student[:, :3], teacher, student[:, 0])
            return DistillationLoss(divergence=divergence, kd_coef=0.7, jsd_beta=0.3)(x).value

        assert torch.autograd.gradcheck(run, (leaf,))

    @pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
    def test_rounding_beyond_one_and_impossible_tokens_stay_finite(self, divergence):
        # The teacher's two candidates add up to a little more than 1; the student all but rules one out; and reversed.
        rows = T([[math.log(0.5) + 1e-7, math.log(0.5) + 1e-7], [0.0, -800.0], [-900.0, -1000.0]], dtype=torch.float64)
        for student, teacher in ((rows, rows.flip(0)), (rows.flip(0), rows)):
            leaf = student.clone().requires_grad_()
            value = DistillationLoss(divergence=divergence)(given(leaf, teacher)).value
            value.sum().backward()
            assert value.isfinite().all() and leaf.grad.isfinite().all()
