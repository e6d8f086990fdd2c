import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from coalign.algorithms import losses
from coalign.algorithms.losses.preference import (
    AOTLoss,
    AOTUnpairedLoss,
    DPOLoss,
    ORPOLoss,
    SimPOLoss,
)
from coalign.algorithms.objective import Objective
from coalign.algorithms.segments import LossTotals
from coalign.backends.base import loss_input
from coalign.data.batch import Batch
from tests.algorithms.responses import responses

T = torch.tensor
WITH_REFERENCE = [
    *("dpo", "ipo", "hinge", "exo_pair", "nca_pair"),
    *("bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop"),
]
BATCH = ["aot", "aot_unpaired"]
WITHOUT_REFERENCE = ["simpo", "cpo", "orpo"]
ROBUST, ALPHA = {"label_smoothing": 0.1, "robust": True}, {"divergence": "alpha"}
DPO_FORMS = [
    *({"label_smoothing": 0.1}, ROBUST, {"length_normalised": True}),
    *({"divergence": "forward_kl"}, {"divergence": "js"}, ALPHA | {"alpha": 0.3}),
    *({"ld_alpha": 0.4}, {"margin_coef": 1.0}, {"nll_coef": 0.7}),
]


def log_sigmoid(z):
    return -math.log1p(math.exp(-z))


def sigmoid(z):
    return 1 / (1 + math.exp(-z))


def exo(z, label):
    return sigmoid(z) * (log_sigmoid(z) - math.log(label))


# r_w = 2 and r_l = -1, so z = 0.5 · 3 = 1.5; the winner has two tokens, the loser three.
LOGPROBS, REFERENCE = [[-1.0, -2.0], [-2.0, -1.0, -1.5]], [[-2.5, -2.5], [-1.0, -1.5, -1.0]]
PAIR = responses(LOGPROBS, ref=REFERENCE, preference=[1, 0], margin=[0.25, 0.0])
Z, NLL = 1.5, 1.5


class TestValuesWorkedByHand:
    @pytest.mark.parametrize(
        ("name", "arguments", "expected"),
        [
            ("dpo", {}, -log_sigmoid(Z)),
            ("dpo", {"label_smoothing": 0.1}, -0.9 * log_sigmoid(Z) - 0.1 * log_sigmoid(-Z)),
            ("dpo", ROBUST, (-0.9 * log_sigmoid(Z) + 0.1 * log_sigmoid(-Z)) / 0.8),
            ("dpo", {"length_normalised": True}, -log_sigmoid(0.5 * (2 / 2 + 1 / 3))),
            ("dpo", {"divergence": "forward_kl"}, -log_sigmoid(0.5 * (-math.exp(-2) + math.exp(1)))),
            ("dpo", {"divergence": "js"}, -log_sigmoid(0.5 * (log_sigmoid(2) - log_sigmoid(-1)))),
            ("dpo", ALPHA | {"alpha": 0.5}, -log_sigmoid(0.5 * (math.exp(-1) - math.exp(0.5)) / -0.5)),
            # The third token of the loser, r = -0.5, counts a quarter: r_l = -0.5 - 0.125.
            ("dpo", {"ld_alpha": 0.25}, -log_sigmoid(0.5 * (2 + 0.625))),
            ("dpo", {"margin_coef": 2.0}, -log_sigmoid(Z - 0.5)),
            ("dpo", {"nll_coef": 0.1}, -log_sigmoid(Z) + 0.1 * NLL),
            ("ipo", {}, (2 / 2 + 1 / 3 - 1) ** 2),
            ("hinge", {}, 0.0),
            ("hinge", {"beta": 0.1}, 0.7),
            ("exo_pair", {"label_smoothing": 0.01}, exo(Z, 0.99) + exo(-Z, 0.01)),
            ("nca_pair", {}, -log_sigmoid(1) - 0.5 * log_sigmoid(-1) - 0.5 * log_sigmoid(0.5)),
            ("bco_pair", {}, -log_sigmoid(1) - log_sigmoid(0.5)),
            ("sppo_hard", {}, (2 - 1) ** 2 + (-1 + 1) ** 2),
            ("apo_zero", {}, sigmoid(-1) + sigmoid(-0.5)),
            ("apo_down", {}, sigmoid(1) + sigmoid(-Z)),
            ("discopop", {"tau": 1.0}, sigmoid(-Z) * -log_sigmoid(Z) + sigmoid(Z) * math.exp(-Z)),
            # log π: -3 against -4.5
            ("cpo", {"nll_coef": 0.3}, -log_sigmoid(0.5 * 1.5) + 0.3 * NLL),
            # mean log π: -1.5 each
            ("simpo", {"gamma": 0.3}, -log_sigmoid(-0.3)),
            ("aot", {}, -log_sigmoid(Z)),
            ("aot_unpaired", {}, -log_sigmoid(Z)),
        ],
    )
    def test_one_pair(self, name, arguments, expected):
        out = getattr(losses, name)(**{"beta": 0.5} | arguments)(PAIR)
        assert out.value.tolist() == pytest.approx([expected])

    def test_orpo(self):
        # Mean log-probs log 0.5 and log 0.2: odds 1 and 0.25.
        x = responses([[math.log(0.5)] * 2, [math.log(0.2)]], preference=[1, 0])
        out = ORPOLoss(beta=0.5)(x)
        assert out.value.item() == pytest.approx(math.log(2) - 0.5 * log_sigmoid(math.log(4)))
        assert out.stats["log_odds"].value == pytest.approx(math.log(4))
        assert out.stats["nll"].value == pytest.approx(math.log(2))

    def test_alpha_po(self):
        x = responses([[math.log(0.5)], [math.log(0.25)]], preference=[1, 0])
        # (1 - p^-0.5) / 0.5 at 0.5 and 0.25: 2(1 - √2) and 2(1 - 2)
        expected = -log_sigmoid(2 * (4 - 2 * math.sqrt(2)) - 0.1)
        assert SimPOLoss(alpha=0.5, gamma=0.1)(x).value.item() == pytest.approx(expected)

    def test_weights_of_the_policys_own_likelihood(self):
        # log Σ π² of -1 everywhere: mean log π + 1 is -0.5 for both responses.
        x = replace(PAIR, collision=torch.full((5,), -1.0))
        logprobs = PAIR.logprobs.clone().requires_grad_()
        value = DPOLoss(beta=0.5, weighted=True, nll_coef=0.1)(replace(x, logprobs=logprobs)).value
        assert value.item() == pytest.approx(-log_sigmoid(Z) * math.exp(-1) + 0.1 * NLL)
        value.backward()  # the weights are not learned from: β (σ(z) - 1) e^-1 per token of the winner
        expected = -0.5 * math.exp(log_sigmoid(-Z) - 1) - 0.1 / 2
        assert logprobs.grad[0].item() == pytest.approx(expected)

    def test_statistics(self):
        stats = DPOLoss(beta=0.5, nll_coef=0.1)(PAIR).stats
        expected = {"rewards/chosen": 1.0, "rewards/rejected": -0.5, "logps/chosen": -3.0, "logps/rejected": -4.5}
        expected |= {"accuracy": 1.0, "margin": 1.5, "nll": 1.5}
        assert {name: stat.value for name, stat in stats.items()} == pytest.approx(expected)
        equal = responses(LOGPROBS, ref=LOGPROBS, preference=[1, 0])
        assert DPOLoss()(equal).stats["accuracy"].value == 0.5
        assert DPOLoss()(replace(PAIR, columns={"preference": T([0.0, 1.0])})).stats["accuracy"].value == 0.0

    def test_alpha_divergence_ends(self):
        for alpha, name in ((0.0, "forward_kl"), (1.0, "reverse_kl")):
            got = DPOLoss(divergence="alpha", alpha=alpha)(PAIR).value
            assert got.item() == pytest.approx(DPOLoss(divergence=name)(PAIR).value.item(), rel=1e-12)


class TestRankings:
    X = responses([[-1.0], [-2.0], [-4.0]], ref=[[-1.0], [-1.0], [-1.0]], group=[0, 0, 0], preference=[0, -1, -2])

    def test_mean_over_all_pairs(self):
        # r = 0, -1, -3: z = 1, 3, 2 at β = 1
        expected = -sum(log_sigmoid(z) for z in (1, 3, 2)) / 3
        out = DPOLoss(beta=1.0)(self.X)
        assert out.value.tolist() == pytest.approx([expected])
        assert out.stats["accuracy"].count == 3

    def test_desensitising_pairs_of_different_lengths(self):
        # r per token; the shared length is that of each pair, not of the group.
        rows = [[1.0, 2.0, 4.0], [0.5], [0.25, 0.25]]
        x = responses(rows, ref=[[0.0] * len(r) for r in rows], group=[0, 0, 0], preference=[3, 2, 1])
        z = [(1 + 0.1 * 6) - 0.5, (3 + 0.1 * 4) - 0.5, 0.5 - (0.25 + 0.1 * 0.25)]
        assert DPOLoss(beta=1.0, ld_alpha=0.1)(x).value.item() == pytest.approx(-sum(map(log_sigmoid, z)) / 3)

    @pytest.mark.parametrize("name", WITH_REFERENCE + WITHOUT_REFERENCE)
    def test_a_group_without_pairs_is_0_and_has_no_gradient(self, name):
        logprobs = T([-1.0, -2.0, -3.0, -0.5], requires_grad=True)
        x = replace(
            responses([[0.0]] * 4, group=[0, 0, 1, 1], preference=[1, 1, 1, 0]),
            logprobs=logprobs,
            ref=T([-1.5, -1.5, -2.0, -2.0]),
        )
        value = getattr(losses, name)()(x).value
        value.sum().backward()
        assert value[0] == 0 and value[1] != 0
        assert logprobs.grad[:2].tolist() == [0.0, 0.0] and logprobs.grad[2:].abs().min() > 0

    @pytest.mark.parametrize("name", [*WITH_REFERENCE, *WITHOUT_REFERENCE, *BATCH])
    def test_no_pairs_at_all(self, name):
        logprobs = T([-1.0, -2.0], requires_grad=True)
        x = replace(responses([[0.0]] * 2, preference=[0, 0]), logprobs=logprobs, ref=T([-1.5, -1.5]))
        value = getattr(losses, name)()(x).value
        value.sum().backward()
        assert value.tolist() == [0.0] and logprobs.grad.tolist() == [0.0, 0.0]


class TestTransport:
    X = responses(
        [[-3.0], [-1.0], [-1.0], [-4.0]],
        ref=[[-1.0], [-2.0], [-3.0], [-1.0]],
        preference=[1, 0, 1, 0],
        group=[0, 0, 1, 1],
    )

    def test_sorted_across_the_batch(self):
        # Policy differences -2, 3; reference differences 1, -2, sorted -2, 1: 0 and 2.
        assert AOTLoss(beta=1.0)(self.X).value.item() == pytest.approx(-(log_sigmoid(0) + log_sigmoid(2)) / 2)
        # r_w: -2, 2; r_l: 1, -3, sorted -3, 1: 1 and 1.
        assert AOTUnpairedLoss(beta=1.0)(self.X).value.item() == pytest.approx(-log_sigmoid(1))

    def test_label_smoothing(self):
        expected = -0.8 * log_sigmoid(1) - 0.2 * log_sigmoid(-1)
        assert AOTUnpairedLoss(beta=1.0, label_smoothing=0.2)(self.X).value.item() == pytest.approx(expected)


class TestGradients:
    ROWS = [[-0.9, -2.3], [-1.1, -0.2, -0.7], [-1.7], [-0.4, -3.0]]
    X = responses(
        ROWS,
        ref=[[-1.0, -2.0], [-1.5, -0.7, -0.1], [-1.2], [-0.9, -2.2]],
        preference=[1, 0, 0, 1],
        margin=[0.3, 0, 0, 0.1],
    )

    @pytest.mark.parametrize("name", [*WITH_REFERENCE, *WITHOUT_REFERENCE, *BATCH])
    def test_gradcheck(self, name):
        logprobs = self.X.logprobs.clone().requires_grad_()
        loss = getattr(losses, name)()
        assert torch.autograd.gradcheck(lambda p: loss(replace(self.X, logprobs=p)).value, (logprobs,))

    @pytest.mark.parametrize("arguments", DPO_FORMS, ids=str)
    def test_gradcheck_of_dpo_forms(self, arguments):
        logprobs = self.X.logprobs.clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda p: DPOLoss(**arguments)(replace(self.X, logprobs=p)).value, (logprobs,))

    @pytest.mark.parametrize("gap", [-5000.0, 5000.0])
    @pytest.mark.parametrize(
        ("name", "arguments"),
        [(n, {}) for n in (*WITH_REFERENCE, *WITHOUT_REFERENCE, *BATCH)] + [("dpo", a) for a in DPO_FORMS],
        ids=str,
    )
    def test_extreme_log_ratios_stay_finite(self, name, arguments, gap):
        logprobs = T([min(gap, 0.0) - 1e-9, min(-gap, 0.0)], requires_grad=True)
        x = replace(
            responses([[0.0], [0.0]], preference=[1, 0], margin=[1, 0]),
            logprobs=logprobs,
            ref=T([min(-gap, 0.0), min(gap, 0.0)]),
        )
        out = getattr(losses, name)(**arguments)(x)
        out.value.sum().backward()
        assert out.value.isfinite().all() and logprobs.grad.isfinite().all()
        assert all(math.isfinite(stat.value) for stat in out.stats.values())

    def test_an_empty_response(self):
        x = responses([[-1.0], []], ref=[[-1.0], []], preference=[1, 0])
        for name in (*WITH_REFERENCE, *WITHOUT_REFERENCE):
            assert getattr(losses, name)()(x).value.isfinite().all(), name


class TestMicroBatches:
    @pytest.mark.parametrize("name", BATCH)
    def test_a_loss_of_the_whole_batch_is_not_divided(self, name):
        batch = Batch(
            T([2, 2, 2, 2]),
            {"tokens": torch.zeros(8, dtype=torch.int32), "ref_logprobs": torch.zeros(8)},
            {"group": T([0, 0, 1, 1]), "preference": T([1.0, 0.0, 0.0, 1.0])},
        )
        logprobs = T([-1.0, -2.0, -3.0, -0.5])
        objective = Objective(getattr(losses, name)(beta=1.0))
        share, _ = objective(loss_input(batch, {"logprobs": logprobs}), LossTotals(4, 4, 2))
        # Log-ratios: winners -1, -0.5; losers -2, -3. `aot`: 1 and 2.5 against 0; unpaired: -1, -0.5 against -3, -2.
        z = (1, 2.5) if name == "aot" else (2, 1.5)
        assert share.item() == pytest.approx(-sum(map(log_sigmoid, z)) / 2)


class TestWhatTheyAskFor:
    def test_traits(self):
        assert DPOLoss(weighted=True).needs == ("ref", "collision")
        for names, traits in (
            (WITH_REFERENCE, ("group", ("ref",))),
            (BATCH, ("batch", ("ref",))),
            ([*WITHOUT_REFERENCE, "bradley_terry"], ("group", ())),
            (["kto", "apo_zero_unpaired"], ("sequence", ("ref",))),
            (["distillation", "process_reward"], ("token", ("candidate_logprobs",))),
        ):
            assert {(loss.per, loss.needs) for name in names if (loss := getattr(losses, name)())} == {traits}


def test_float32_sums_do_not_lose_small_ratios():
    """The log-ratio is summed token by token: the difference of two long sums would be rounding."""
    size = 4000
    logprobs = torch.full((2 * size,), -5.3)
    ref = logprobs - torch.cat([torch.full((size,), 1e-5), torch.zeros(size)])
    x = replace(responses([[0.0] * size] * 2, preference=[1, 0]), logprobs=logprobs, ref=ref)
    exact = 0.1 * (logprobs.double() - ref.double())[:size].sum().item()
    assert DPOLoss()(x).stats["margin"].value == pytest.approx(exact, rel=1e-9)
    assert F.softplus(T(-exact)).item() == pytest.approx(DPOLoss()(x).value.item(), rel=1e-6)
