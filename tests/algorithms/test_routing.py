"""The routers' losses and statistics, against values worked by hand and the function of transformers."""

import math

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from coalign.algorithms.routing import balance_loss, count_choices, describe_load, z_loss

# Softmax of a row (ln a, ln b) is (a, b) / (a + b).
LOGITS = torch.tensor([[3.0, 1.0], [1.0, 1.0], [9.0, 1.0]]).log().double()
WEIGHTS = torch.tensor([1.0, 2.0, 0.0])  # the second token counts twice, the third is padding


def test_balance_loss_by_hand():
    counts = count_choices(torch.tensor([[0], [1], [0]]), WEIGHTS, 2)
    assert counts.tolist() == [1.0, 2.0]
    # f = (1/3, 2/3), P = (3/4 + 2 · 1/2, 1/4 + 2 · 1/2) / 3 = (7/12, 5/12), so 2 (7/36 + 10/36)
    assert float(balance_loss(LOGITS, WEIGHTS, counts, 3.0)) == pytest.approx(34 / 36)


def test_z_loss_by_hand():
    expected = (math.log(4) ** 2 + 2 * math.log(2) ** 2) / 3
    assert float(z_loss(LOGITS, WEIGHTS, 3.0)) == pytest.approx(expected)


def test_gradients_are_those_of_finite_differences():
    torch.manual_seed(0)
    logits = torch.randn(5, 4).requires_grad_()
    chosen = logits.topk(2, -1).indices
    weights = torch.tensor([1.0, 1, 3, 0, 2])
    counts = count_choices(chosen, weights, 4)
    for loss in (lambda x: balance_loss(x, weights, counts, 7.0), lambda x: z_loss(x, weights, 7.0)):
        (gradient,) = torch.autograd.grad(loss(logits), logits)
        direction = torch.randn(5, 4)
        with torch.no_grad():
            rise = (loss(logits + 1e-2 * direction) - loss(logits - 1e-2 * direction)) / 2e-2
        assert float(rise) == pytest.approx(float((gradient * direction).sum()), rel=1e-2, abs=1e-4)


def test_balance_loss_is_that_of_transformers():
    torch.manual_seed(1)
    logits, mask = torch.randn(2 * 6, 8), torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    theirs = load_balancing_loss_func((logits,), num_experts=8, top_k=2, attention_mask=mask)
    weights = mask.flatten().float()
    chosen = logits.topk(2, -1).indices
    counts = count_choices(chosen, weights, 8)
    whole = balance_loss(logits, weights, counts, 10.0)
    assert float(whole) == pytest.approx(float(theirs), rel=1e-6)
    parts = [balance_loss(a, w, counts, 10.0) for a, w in zip(logits.split(5), weights.split(5), strict=True)]
    assert float(sum(parts)) == pytest.approx(float(theirs), rel=1e-6)


def test_load():
    stats = describe_load(torch.tensor([[4.0, 0, 0, 0], [1, 1, 1, 1]]).double())
    assert {name: stat.value for name, stat in stats.items()} == pytest.approx(
        {"router/max_load": 2.5, "router/entropy": 0.5, "router/dead_experts": 3 / 8}
    )
