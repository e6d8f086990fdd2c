import math

import pytest
import torch
from torch import nn

from coalign.config.schema import OptimizerConfig
from coalign.modules.optim import adamw, clip, learning_rate


def rates(total: int, **config) -> list[float]:
    return [learning_rate(i, OptimizerConfig(lr=1.0, **config), total=total) for i in range(total)]


def test_schedules_by_hand():
    assert rates(3) == [1.0, 1.0, 1.0]
    assert rates(5, schedule="linear") == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])
    assert rates(5, schedule="linear", min_lr_ratio=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert rates(5, schedule="cosine") == pytest.approx([0.5 + 0.5 * math.cos(math.pi * i / 4) for i in range(5)])


def test_warm_up_moves_at_once_and_ends_at_the_full_rate():
    assert rates(6, warmup=3) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])
    assert rates(4, warmup=1, schedule="linear") == pytest.approx([0.5, 1.0, 0.5, 0.0])


def test_a_run_longer_than_planned_stays_at_the_floor():
    assert learning_rate(99, OptimizerConfig(lr=2.0, schedule="cosine", min_lr_ratio=0.1), total=5) == pytest.approx(
        0.2
    )


def test_adamw_agrees_with_torch_and_spares_vectors_from_decay():
    torch.manual_seed(0)
    ours, theirs = (nn.Linear(3, 2) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    config = OptimizerConfig(lr=0.1, weight_decay=0.5)
    first = adamw(ours.parameters(), config)
    plain = {"lr": 0.1, "betas": config.betas, "eps": config.eps}
    second = [
        torch.optim.AdamW([theirs.weight], weight_decay=0.5, **plain),
        torch.optim.AdamW([theirs.bias], weight_decay=0.0, **plain),
    ]
    for _ in range(3):
        for layer, optimizers in ((ours, [first]), (theirs, second)):
            layer(torch.ones(1, 3)).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    torch.testing.assert_close(ours.weight, theirs.weight)
    torch.testing.assert_close(ours.bias, theirs.bias)


def test_clip_returns_the_norm_before_clipping():
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    a.grad, b.grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    assert clip([a, b], None) == 5.0
    assert clip([a, b], 10.0) == 5.0 and a.grad.tolist() == [3.0, 0.0]
    assert clip([a, b], 1.0) == 5.0
    assert a.grad.tolist() == pytest.approx([0.6, 0.0]) and b.grad.tolist() == pytest.approx([0.8])


def test_clip_leaves_what_is_not_finite_alone():
    a = nn.Parameter(torch.zeros(2))
    a.grad = torch.tensor([math.inf, 1.0])
    assert clip([a], 1.0) == math.inf
    a.grad = torch.tensor([math.nan, 1.0])
    assert math.isnan(clip([a], 1.0))
