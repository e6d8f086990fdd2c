import math

import pytest
import torch

from coalign.algorithms.losses.policy import PolicyGradient, ValueLoss
from coalign.algorithms.losses.supervised import SFTLoss
from coalign.types import LossInput

T = torch.tensor


def given(**columns):
    """A LossInput of one sequence, in float64."""
    tensors = {name: torch.as_tensor(c, dtype=torch.float64) for name, c in columns.items()}
    size = len(next(iter(tensors.values())))
    return LossInput(segment=torch.zeros(size, dtype=torch.int64), sequences=1, **tensors)


class TestPolicyGradient:
    def test_worked_by_hand(self):
        # Ratios 1.5, 0.5, 1.5, 0.5, 1.1 with A = 1, 1, -1, -1, 2 and clips 0.2 / 0.28:
        # -min(1.5, 1.28) = -1.28; -min(0.5, 0.8) = -0.5; max(1.5, 1.28) = 1.5; max(0.5, 0.8) = 0.8; -2.2
        ratio = T([1.5, 0.5, 1.5, 0.5, 1.1], dtype=torch.float64)
        x = given(logprobs=ratio.log() - 3, old=[-3.0] * 5, advantages=[1, 1, -1, -1, 2])
        out = PolicyGradient(clip_low=0.2, clip_high=0.28)(x)
        assert out.value.tolist() == pytest.approx([-1.28, -0.5, 1.5, 0.8, -2.2])
        assert out.stats["clip_fraction"].value == pytest.approx(2 / 5)
        assert out.stats["ratio"].value == pytest.approx(5.1 / 5)
        assert out.stats["ratio_max"].value == pytest.approx(1.5)
        # k3 of the anchor against the policy: ratio - 1 - ln ratio
        assert out.stats["approx_kl"].value == pytest.approx(sum(r - 1 - math.log(r) for r in ratio.tolist()) / 5)

    def test_dual_clip_worked_by_hand(self):
        # A = -2: 5 * 2 = 10 is held at c * 2 = 6; A = 2 is left to the ordinary clip: -1.2 * 2.
        x = given(logprobs=[math.log(5)] * 2, old=[0.0, 0.0], advantages=[-2, 2])
        out = PolicyGradient(dual_clip=3.0)(x)
        assert out.value.tolist() == pytest.approx([6.0, -2.4])
        assert out.stats["dual_clip_fraction"].value == 0.5

    def test_penalties_worked_by_hand(self):
        # On policy the surrogate is -A; k3 with d = ln 2: 1/2 - 1 + ln 2 = 0.193147.
        x = given(logprobs=[0.0], old=[0.0], advantages=[1.0], ref=[-math.log(2)], entropy=[1.5])
        out = PolicyGradient(kl_coef=0.1, entropy_coef=0.01)(x)
        assert out.value.item() == pytest.approx(-1 + 0.1 * 0.193147 - 0.015, abs=1e-6)
        k1 = PolicyGradient(kl_coef=0.1, kl_estimator="k1")(x).value.item()
        assert k1 == pytest.approx(-1 + 0.1 * math.log(2))

    def test_gradcheck(self):
        logprobs = T([-0.9, -2.3, -1.1, -0.2], dtype=torch.float64, requires_grad=True)
        entropy = T([0.5, 1.0, 0.1, 2.0], dtype=torch.float64, requires_grad=True)
        fixed = {"old": [-1.0, -2.0, -1.0, -3.0], "advantages": [1.0, -1.0, 0.3, -2.0], "ref": [-1.2, -2.0, -4.0, 0.0]}

        def run(logprobs, entropy):
            x = given(logprobs=logprobs, entropy=entropy, **fixed)
            return PolicyGradient(dual_clip=3.0, kl_coef=0.1, entropy_coef=0.01)(x).value

        assert torch.autograd.gradcheck(run, (logprobs, entropy))

    def test_reference_statistics(self):
        x = given(logprobs=[-1.0, -1.0], old=[-1.0, -1.0], ref=[-1.0, -2.0], advantages=[0, 0])
        stats = PolicyGradient()(x).stats
        assert stats["kl_ref"].value == pytest.approx(math.exp(-1) / 2)

    def test_no_tokens(self):
        out = PolicyGradient()(given(logprobs=[], old=[], advantages=[], rollout=[]))
        assert out.value.shape == (0,)
        assert "ratio_max" not in out.stats and out.stats["ratio"].count == 0


def test_entropy_is_asked_for_only_where_it_is_used():
    assert PolicyGradient().needs == SFTLoss().needs == ()
    assert PolicyGradient(entropy_coef=0.01, clip_low=0.1).needs == ("entropy",)


class TestValue:
    def test_worked_by_hand(self):
        # (2 - 1)²/2, (0 - 3)²/2
        out = ValueLoss()(given(values=[2.0, 0.0], returns=[1.0, 3.0]))
        assert out.value.tolist() == [0.5, 4.5]
        assert out.stats["squared_error"].value == 5.0

    def test_clip_worked_by_hand(self):
        # V 2, old 1, R 3, c 0.2: max((2 - 3)², (1.2 - 3)²)/2 = 1.62.  V 2, old 1, R 0: max(4, 1.44)/2 = 2.
        out = ValueLoss(clip=0.2)(given(values=[2.0, 2.0], old_values=[1.0, 1.0], returns=[3.0, 0.0]))
        assert out.value.tolist() == pytest.approx([1.62, 2.0])
        assert out.stats["clip_fraction"].value == 0.5

    def test_gradcheck(self):
        values = T([2.0, 2.0, 1.1], dtype=torch.float64, requires_grad=True)
        run = lambda v: ValueLoss(clip=0.2)(given(values=v, old_values=[1.0] * 3, returns=[3.0, 0.0, 4.0])).value  # noqa: E731
        assert torch.autograd.gradcheck(run, (values,))


def test_sft_is_the_negative_log_likelihood():
    out = SFTLoss()(given(logprobs=[-1.0, -3.0]))
    assert out.value.tolist() == [1.0, 3.0]
    assert out.stats["nll"].value == 2.0
