import math

import pytest

from coalign.backends.optim import compute_learning_rate
from coalign.config.schema import OptimizerConfig


def rates(total: int, **config) -> list[float]:
    return [compute_learning_rate(i, OptimizerConfig(lr=1.0, **config), total=total) for i in range(total)]


def test_schedules_by_hand():
    assert rates(3) == [1.0, 1.0, 1.0]
    assert rates(5, schedule="linear") == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])
    assert rates(5, schedule="linear", min_lr_ratio=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert rates(5, schedule="cosine") == pytest.approx([0.5 + 0.5 * math.cos(math.pi * i / 4) for i in range(5)])
    assert rates(5, schedule="cosine", min_lr_ratio=0.5) == pytest.approx(
        [0.75 + 0.25 * math.cos(math.pi * i / 4) for i in range(5)]
    )


def test_warm_up_moves_at_once_and_ends_at_the_full_rate():
    assert rates(6, warmup=3) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])
    assert rates(4, warmup=1, schedule="linear") == pytest.approx([0.5, 1.0, 0.5, 0.0])


def test_wsd_stays_and_falls_in_the_last_units():
    assert rates(6, schedule="wsd", decay=2) == pytest.approx([1.0, 1.0, 1.0, 1.0, 0.5, 0.0])
    assert rates(6, schedule="wsd", warmup=1, decay=4, min_lr_ratio=0.2) == pytest.approx([0.5, 1, 0.8, 0.6, 0.4, 0.2])
    assert rates(3, schedule="wsd") == [1.0, 1.0, 1.0]
    assert rates(3, schedule="wsd", decay=4) == pytest.approx([0.5, 0.25, 0.0])  # longer than the run
    assert rates(1, schedule="cosine") == rates(1, schedule="linear") == [1.0]


def test_a_run_longer_than_planned_stays_at_the_floor():
    for settings in ({"schedule": "cosine"}, {"schedule": "linear"}, {"schedule": "wsd", "decay": 2}):
        config = OptimizerConfig(lr=2.0, min_lr_ratio=0.1, **settings)
        assert compute_learning_rate(99, config, total=5) == pytest.approx(0.2)
