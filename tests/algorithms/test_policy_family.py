"""The losses of a policy: what each is by hand, and what holds for all of them."""

import math
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature

import pytest
import torch

from coalign.algorithms.losses.policy import (
    CISPOLoss,
    GMPOLoss,
    GSPOLoss,
    KLCovLoss,
    PolicyGradient,
    PolicyLoss,
    ReinforceLoss,
    SAPOLoss,
    Surrogate,
    TOPRLoss,
)
from coalign.algorithms.objective import Objective
from coalign.algorithms.segments import LossTotals, aggregation_weights
from coalign.backends.base import build_objective
from coalign.config.functions import bind, list_arguments
from coalign.config.schema import LossConfig
from coalign.types import LossInput, LossOutput, merge_stats

T = torch.tensor
EXACT = {"dtype": torch.float64}
FIELDS = ("logprobs", "entropy", "old", "rollout", "ref", "advantages")
OVER_SEQUENCES = ["sequence_mean_token_mean", "sequence_mean_token_sum", "constant"]
FAMILY = {
    "policy_gradient": PolicyGradient,
    "gspo": GSPOLoss,
    "gspo-token": partial(GSPOLoss, form="token"),
    "cispo": CISPOLoss,
    "sapo": SAPOLoss,
    "gmpo": GMPOLoss,
    "reinforce": ReinforceLoss,
    "kl_cov": KLCovLoss,
    "topr": TOPRLoss,
}
CLIPPED = ("policy_gradient", "gspo", "gspo-token", "cispo", "gmpo")
OWN_WEIGHT = ("topr",)  # their ratio is to the sampler: `is_level` is refused


def given(segment, sequences=None, **columns):
    """A LossInput whose log-probs learn."""
    tensors = {name: torch.as_tensor(c, **EXACT) for name, c in columns.items()}
    tensors["logprobs"].requires_grad_()
    size = {"segment": T(segment, dtype=torch.int64), "sequences": sequences or max(segment) + 1}
    return LossInput(columns=marked(len(segment)), **size, **tensors)


def marked(tokens):
    """The column that `kl_cov` reads: every second token."""
    return {"high_covariance": torch.arange(tokens) % 2 == 1}


def drawn(lengths, *, seed=0, per_sequence=True, noise=0.3):
    """Random responses of the given lengths, all of LossInput's fields filled."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    draw = lambda n=total: torch.randn(n, generator=generator, **EXACT)  # noqa: E731
    segment = torch.repeat_interleave(torch.arange(len(lengths)), T(lengths))
    old = -draw().abs() - 0.1
    return LossInput(
        segment=segment,
        sequences=len(lengths),
        logprobs=(old + noise * draw()).requires_grad_(),
        entropy=draw().abs().requires_grad_(),
        old=old,
        rollout=old + noise * draw(),
        ref=old + draw(),
        advantages=draw(len(lengths))[segment] if per_sequence else draw(),
        columns=marked(total),
    )


def aggregated(x, loss, aggregation, totals=None):
    """(the scalar, its gradient, the statistics)."""
    totals = totals or LossTotals(len(x.segment), len(x.segment.unique()), x.sequences)
    out = loss(x)
    how = {"aggregation": aggregation, "totals": totals, "constant_length": 7}
    value = (out.value * aggregation_weights(x.segment, x.sequences, **how)).sum()
    return value.detach(), torch.autograd.grad(value, x.logprobs)[0], out.stats


class TestGspo:
    def test_worked_by_hand(self):
        # Sequence 0: log-ratios 0.3, -0.1, 0.4, mean 0.2, s = e^0.2 = 1.2214 above 1.1: A = 2 gives -1.1 · 2.
        # Sequence 2: log-ratio -0.5, s = 0.6065 below 0.9: A = -1 gives 0.9. Sequence 1 is empty.
        # Sequence 3: s = e^0.2 with A = -1 is not held back: 1.2214.
        logprobs, advantages = [-0.7, -1.1, -0.6, -1.5, -0.8], [2, 2, 2, -1, -1]
        x = given([0, 0, 0, 2, 3], logprobs=logprobs, old=[-1.0] * 5, advantages=advantages)
        out = GSPOLoss(clip_low=0.1, clip_high=0.1)(x)
        assert out.value.tolist() == pytest.approx([-2.2, -2.2, -2.2, 0.9, math.exp(0.2)])
        assert out.stats["clip_fraction"].value == pytest.approx(4 / 5)  # of tokens, as the paper counts
        assert out.stats["ratio_max"].value == pytest.approx(math.exp(0.2))

    @pytest.mark.parametrize("aggregation", OVER_SEQUENCES)
    @pytest.mark.parametrize("clip", [0.05, 10.0])
    def test_both_forms_are_one_where_a_sequence_has_one_advantage(self, aggregation, clip):
        x = drawn([4, 0, 1, 9, 3])
        settings = {"clip_low": clip, "clip_high": clip, "kl_coef": 0.1, "is_level": "sequence"}
        (a, da, _), (b, db, _) = (
            aggregated(x, GSPOLoss(form=form, **settings), aggregation) for form in ("sequence", "token")
        )
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(da, db)

    def test_token_form_gives_each_token_its_own_advantage(self):
        # s = 1 in value; the gradient of a token is minus its own advantage, of the other form minus the mean.
        x = given([0, 0], logprobs=[-1.0, -2.0], old=[-1.0, -2.0], advantages=[3.0, -1.0])
        for form, expected in (("token", [-1.5, 0.5]), ("sequence", [-0.5, -0.5])):
            _, gradient, _ = aggregated(x, GSPOLoss(form=form), "sequence_mean_token_mean")
            assert gradient.tolist() == pytest.approx(expected)

    def test_long_sequences_do_not_lose_the_clip_range(self):
        # 100 000 tokens of log-ratio 1e-4 each: s = e^1e-4, in float32.
        n = 100_000
        x = LossInput(
            segment=torch.zeros(n, dtype=torch.int64),
            sequences=1,
            logprobs=torch.full((n,), -1.0),
            old=torch.full((n,), -1.0 - 1e-4),
            advantages=torch.ones(n),
        )
        assert GSPOLoss()(x).stats["ratio"].value == pytest.approx(math.exp(1e-4), abs=1e-6)

    def test_what_it_is_defined_for(self):
        GSPOLoss(is_level="token", form="token")
        for aggregation in OVER_SEQUENCES:
            Objective(GSPOLoss(), aggregation)


class TestCispo:
    def test_worked_by_hand(self):
        # Ratios 2, 0.1, 9 with bounds 0.5 and 5: weights 2, 0.5, 5; values -w A log π.
        x = given(
            [0, 0, 0],
            logprobs=[-1.0, -2.0, -0.5],
            old=[-1 - math.log(2), -2 - math.log(0.1), -0.5 - math.log(9)],
            advantages=[1.0, 2.0, -3.0],
        )
        out = CISPOLoss(clip_low=0.5, clip_high=4.0)(x)
        assert out.value.tolist() == pytest.approx([2.0, 2.0, -7.5])
        assert out.stats["clip_fraction"].value == pytest.approx(2 / 3)
        out.value.sum().backward()
        assert x.logprobs.grad.tolist() == pytest.approx([-2.0, -1.0, 15.0])  # -w A: clipped tokens keep theirs

    def test_the_default_bounds_from_above_only(self):
        x = given([0, 0], logprobs=[-1.0, -1.0], old=[8.0, -9.0], advantages=[1.0, 1.0])
        assert CISPOLoss()(x).value.tolist() == pytest.approx([math.exp(-9), 5.0])


class TestSapo:
    def test_worked_by_hand(self):
        # τ = 1 where A > 0, 2 elsewhere. ρ = 2: 4σ(1) · 3 = 8.772703; ρ = 1/2: 4/2 σ(-1) = 0.537883, times A = -1.
        x = given([0, 1], logprobs=[-1.0, -1.0], old=[-1 - math.log(2), -1 + math.log(2)], advantages=[3.0, -1.0])
        out = SAPOLoss(tau_pos=1.0, tau_neg=2.0)(x)
        assert out.value.tolist() == pytest.approx([-8.772703, 0.537883], abs=1e-6)
        # The gradient is -ρA times 4σ(1 - σ): 0.7864477 in both, for σ(1) σ(-1) = 0.196612.
        out.value.sum().backward()
        assert x.logprobs.grad.tolist() == pytest.approx([-2 * 3 * 0.7864477, 0.5 * 0.7864477], abs=1e-6)
        assert out.stats["gate"].value == pytest.approx(0.7864477, abs=1e-6)


class TestGmpo:
    def test_worked_by_hand(self):
        # Sequence 0, A = 2: log-ratios 0.3 (held at 0.1), -0.4 (passes), mean -0.15. Sequence 1, A = -1: 0.3 passes,
        # -0.4 is held at -0.2, mean 0.05. Sequence 2, A = 0: nothing.
        old = [-1.0] * 5
        x = given([0, 0, 1, 1, 2], logprobs=[-0.7, -1.4, -0.7, -1.4, -3.0], old=old, advantages=[2, 2, -1, -1, 0])
        out = GMPOLoss(clip_low=0.2, clip_high=0.1)(x)
        a, b = math.exp(-0.15), math.exp(0.05)
        assert out.value.tolist() == pytest.approx([-2 * a, -2 * a, b, b, 0.0])
        assert out.stats["clip_fraction"].value == pytest.approx(2 / 5)
        # A held token has no gradient, the other one -A s / 2 for each of the two places of the value.
        out.value.sum().backward()
        assert x.logprobs.grad.tolist() == pytest.approx([0, -2 * a, b, 0, 0])


class TestKLCov:
    def test_worked_by_hand(self):
        # Ratios 2 and 1/2; only the second token is marked: 0.5 · |log ½| is added, and nothing is clipped.
        x = given([0, 0], logprobs=[-1.0, -1.0], old=[-1 - math.log(2), -1 + math.log(2)], advantages=[3.0, -1.0])
        out = KLCovLoss(cov_coef=0.5)(x)
        assert out.value.tolist() == pytest.approx([-6.0, 0.5 + 0.5 * math.log(2)])
        out.value.sum().backward()
        assert x.logprobs.grad.tolist() == pytest.approx([-6.0, 0.5 - 0.5])
        assert out.stats["cov_fraction"].value == 0.5
        assert out.stats["cov_distance"].value == pytest.approx(math.log(2))


class TestTopr:
    def test_worked_by_hand(self):
        # Of whole responses. 0 was right: weight 1 at any ratio. 1: e^(-0.5 + 0.2) = e^-0.3. 2: e^0.4, held at 1.
        x = given(
            [0, 0, 1, 1, 2],
            logprobs=[-1.0, -2.0, -1.5, -0.8, -0.6],
            old=[0.0] * 5,  # not read but for statistics
            rollout=[-3.0, -1.0, -1.0, -1.0, -1.0],
            advantages=[0.5, 0.5, -0.5, -0.5, -2.0],
        )
        out = TOPRLoss()(x)
        w = math.exp(-0.3)
        assert out.value.tolist() == pytest.approx([0.5, 1.0, -0.75 * w, -0.4 * w, -1.2])
        out.value.sum().backward()
        assert x.logprobs.grad.tolist() == pytest.approx([-0.5, -0.5, 0.5 * w, 0.5 * w, 2.0])  # -w A
        assert out.stats["taper"].value == pytest.approx((2 * w + 1) / 3)
        assert TOPRLoss(ratio_limit=0.1)(x).value[2:].tolist() == pytest.approx([-0.075, -0.04, -0.12])

    def test_a_mistake_that_is_unlearned_has_no_gradient_left(self):
        x = given([0], logprobs=[-50.0], old=[-1.0], rollout=[-1.0], advantages=[-1.0])
        TOPRLoss()(x).value.sum().backward()
        assert 0 < x.logprobs.grad.item() < 1e-8
        on_policy = replace(x, rollout=x.logprobs.detach())
        assert TOPRLoss()(on_policy).value.tolist() == ReinforceLoss()(on_policy).value.tolist() == [-50.0]


@pytest.mark.parametrize("name", FAMILY)
class TestAll:
    def test_on_policy_they_are_reinforce(self, name):
        x = drawn([3, 0, 1, 6])
        x = replace(x, old=x.logprobs.detach(), rollout=x.logprobs.detach(), entropy=None, ref=None)
        _, gradient, stats = aggregated(x, FAMILY[name](), "sequence_mean_token_mean")
        lengths = T([3.0] * 3 + [1.0] + [6.0] * 6, **EXACT)
        torch.testing.assert_close(gradient, -x.advantages / lengths / 3)
        assert stats["ratio"].value == 1.0
        assert name not in CLIPPED or stats["clip_fraction"].value == 0.0

    @pytest.mark.parametrize("aggregation", OVER_SEQUENCES)
    @pytest.mark.parametrize("level", ["none", "sequence", "product"])
    def test_cuts_and_order_change_nothing(self, name, aggregation, level):
        if name in OWN_WEIGHT and level != "none":
            pytest.skip("refused")
        lengths = [4, 0, 1, 7, 2, 5]
        x = drawn(lengths)
        weights = {"is_level": level, "is_mode": "mask", "is_low": 0.7, "is_high": 1.4}
        loss = FAMILY[name](kl_coef=0.1, entropy_coef=0.01, drift_limit=0.1, **weights)
        value, gradient, stats = aggregated(x, loss, aggregation)
        totals = LossTotals(sum(lengths), 5, 6)
        got = torch.zeros_like(gradient)
        values, seen = [], []
        for rows in ([5, 1], [3], [4, 0, 2]):
            where = torch.cat([(x.segment == row).nonzero().flatten() for row in rows])
            columns = {f: getattr(x, f).detach()[where] for f in FIELDS}
            columns["logprobs"].requires_grad_()
            segment = torch.repeat_interleave(torch.arange(len(rows)), T([lengths[row] for row in rows]))
            own = {"high_covariance": x.columns["high_covariance"][where]}
            part = LossInput(segment=segment, sequences=len(rows), columns=own, **columns)
            share, got[where], found = aggregated(part, loss, aggregation, totals)
            values.append(share)
            seen.append(found)
        torch.testing.assert_close(sum(values), value)
        torch.testing.assert_close(got, gradient)
        merged = {k: v.value for k, v in merge_stats(seen).items()}
        assert merged == pytest.approx({k: v.value for k, v in stats.items()}, nan_ok=True)

    def test_weights_multiply_the_surrogate_and_nothing_else(self, name):
        if name in OWN_WEIGHT:
            pytest.skip("refused")
        x = drawn([2, 3])
        level = {"is_level": "sequence", "is_high": 9.0}
        penalties = {"kl_coef": 0.1, "entropy_coef": 0.01}
        plain, weighted, both, bare = (
            FAMILY[name](**settings)(x).value for settings in ({}, level, level | penalties, penalties)
        )
        w = (x.old - x.rollout).exp()
        w = torch.cat([w[:2].prod().pow(1 / 2).expand(2), w[2:].prod().pow(1 / 3).expand(3)])
        torch.testing.assert_close(weighted, plain * w)
        torch.testing.assert_close(both - weighted, bare - plain)

    def test_the_first_update_is_weighted_too(self, name):
        """Without a column of old log-probs the anchor is the policy itself: the ratio is 1, the weight is not."""
        if name in OWN_WEIGHT:
            pytest.skip("refused")
        x = drawn([2, 1])
        x = replace(x, old=x.logprobs.detach(), entropy=None, ref=None)
        loss = FAMILY[name](is_level="product", is_high=1e9)
        _, gradient, stats = aggregated(x, loss, "sequence_mean_token_sum")
        w = (x.logprobs.detach() - x.rollout).exp()
        w = T([w[:2].prod(), w[:2].prod(), w[2]], **EXACT)
        torch.testing.assert_close(gradient, -w * x.advantages / 2)
        assert stats["approx_kl"].value == 0.0 and stats["ess"].value < 1

    def test_drifted_mistakes_leave_worked_by_hand(self, name):
        # mean of log π_rollout - log π: 0.3 in sequences 0 and 2, 0.1 in 1. Only 0 is above the limit with A < 0.
        x = given(
            [0, 0, 1, 2],
            logprobs=[-1.0, -1.0, -1.0, -1.0],
            old=[-1.0, -1.0, -1.0, -1.0],
            rollout=[-0.5, -0.9, -0.9, -0.7],
            advantages=[-1.0, -1.0, -1.0, 1.0],
            ref=[-1.5] * 4,
        )
        plain, limited = (FAMILY[name](**settings)(x) for settings in ({}, {"drift_limit": 0.2}))
        assert limited.value.tolist() == [0.0, 0.0, *plain.value.tolist()[2:]] and plain.value.all()
        assert limited.stats["drift_fraction"].value == 0.5
        # What leaves is the surrogate, not the pull towards the reference.
        pulled, free = (FAMILY[name](kl_coef=1.0, **settings)(x).value for settings in ({"drift_limit": 0.2}, {}))
        torch.testing.assert_close(pulled - limited.value, free - plain.value)

    def test_extremes_stay_finite(self, name):
        x = LossInput(
            segment=T([0, 0, 1, 1]),
            sequences=2,
            logprobs=T([0.0, -1000.0, 0.0, -1000.0], requires_grad=True),
            old=T([-1000.0, 0.0, -1000.0, -1000.0]),
            rollout=T([0.0, -1000.0, -1000.0, 0.0]),
            ref=T([-1000.0, 0.0, 0.0, -1.0]),
            advantages=T([1.0, -1.0, -1.0, 1.0]),
            columns=marked(4),
        )
        for level in ("none",) if name in OWN_WEIGHT else ("none", "sequence", "product"):
            out = FAMILY[name](kl_coef=0.1, kl_corrected=True, is_level=level, drift_limit=0.1)(x)
            (gradient,) = torch.autograd.grad(out.value.sum(), x.logprobs)
            assert out.value.isfinite().all() and gradient.isfinite().all()
            assert all(math.isfinite(s.value) for s in out.stats.values())

    def test_no_tokens(self, name):
        x = given([], 2, **{field: [] for field in FIELDS})
        level = "none" if name in OWN_WEIGHT else "sequence"
        assert FAMILY[name](is_level=level, kl_coef=0.1)(x).value.shape == (0,)


@pytest.mark.parametrize("loss", FAMILY.values(), ids=FAMILY)
def test_they_ask_for_what_they_read(loss):
    assert loss().needs == ()
    assert loss(measure_entropy=True, kl_coef=0.1).needs == ("entropy", "ref")
    assert loss(entropy_coef=0.1).needs == ("entropy",)


@pytest.mark.parametrize(
    "loss", [PolicyGradient, GSPOLoss, SAPOLoss, GMPOLoss, KLCovLoss, ReinforceLoss]
)  # the others stop a part of the gradient: see closed forms
def test_gradient_against_finite_differences(loss):
    x = drawn([3, 0, 2], seed=5, noise=0.02)
    fixed = {field: getattr(x, field) for field in ("old", "rollout", "ref", "advantages")}

    def run(logprobs, entropy):
        part = LossInput(segment=x.segment, sequences=3, logprobs=logprobs, entropy=entropy, columns=x.columns, **fixed)
        clip = {"clip_high": 0.01} if "clip_high" in signature(loss).parameters else {}
        return loss(kl_coef=0.1, entropy_coef=0.01, is_level="sequence", **clip)(part).value

    assert torch.autograd.gradcheck(run, (x.logprobs, x.entropy))


@pytest.mark.parametrize("loss", [PolicyGradient, CISPOLoss])
@pytest.mark.parametrize("anchor", [[0.3, -1.0, 0.5], [1.0, 0.0, -0.4]])  # on policy, off policy
def test_the_corrected_divergence_has_the_gradient_of_the_divergence(loss, anchor):
    """A softmax over three tokens, enumerated: Σ π_old ∇(ρ k3) against ∇KL(π ‖ π_ref); k3 alone has another."""
    logits = T([0.3, -1.0, 0.5], **EXACT).requires_grad_()
    ref, old = T([0.2, 0.5, 0.3], **EXACT).log(), T(anchor, **EXACT).log_softmax(0)
    policy = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - ref)).sum(), logits, retain_graph=True)

    def expected(**settings):
        x = LossInput(segment=T([0, 1, 2]), sequences=3, logprobs=policy, old=old, ref=ref, advantages=torch.zeros(3))
        value = (old.exp() * loss(kl_coef=1.0, **settings)(x).value).sum()
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    torch.testing.assert_close(expected(kl_corrected=True), exact)
    assert (expected() - exact).abs().max() > 0.01


# ---- what a loss of one's own gets


@dataclass(frozen=True, kw_only=True)
class Plain(PolicyLoss):
    """REINFORCE, with a factor."""

    scale: float = 2.0

    def surrogate(self, x, logprobs, old, advantages) -> Surrogate:
        return -self.scale * advantages * logprobs, torch.ones_like(logprobs), {}


def test_a_surrogate_of_ones_own_has_all_settings_of_the_family():
    shared = {name: p.default for name, p in list_arguments(PolicyLoss).items()}
    for loss in (Plain, PolicyGradient, GSPOLoss, CISPOLoss):
        assert shared.items() <= bind(loss, {}, "loss").items()
    assert bind(Plain, {"kl_coef": 1}, "loss") == {"scale": 2.0, **shared, "kl_coef": 1.0}
    assert list(list_arguments(Plain)) == ["scale", *shared]
    assert Plain(entropy_coef=0.1, kl_coef=0.2).needs == ("entropy", "ref")
    objective = build_objective(LossConfig(fn=f"{__name__}:Plain", scale=3, kl_coef=0.1))
    assert objective.loss == Plain(scale=3.0, kl_coef=0.1) and objective.needs == ("ref",)
    x = drawn((2, 1))
    out = Plain(scale=3.0, entropy_coef=0.5)(x).value
    assert torch.allclose(out, -3.0 * x.advantages * x.logprobs - 0.5 * x.entropy)


def squared(x: LossInput, *, scale: float = 1.0, power: int) -> LossOutput:
    return LossOutput(scale * x.logprobs**power)


squared.aggregations = ("token_mean",)
squared.needs = lambda *, scale, power: ("entropy",) * power if scale > 1 else ()


def test_a_function_of_ones_own_is_a_loss():
    settings = {"fn": f"{__name__}:squared", "power": 2}
    objective = build_objective(LossConfig(**settings))
    assert (objective.per, objective.needs, objective.loss.settings) == ("token", (), {"scale": 1.0, "power": 2})
    assert objective.loss(drawn((2, 1))).value.tolist() == (drawn((2, 1)).logprobs ** 2).tolist()
    assert build_objective(LossConfig(**settings, scale=3.0)).needs == ("entropy", "entropy")
