"""Whichever backend trains, a policy makes the same samples, and the trainer learns the same from them."""

from __future__ import annotations

import pytest

from tests.conformance.backends import DEEPSPEED, MEGATRON
from tests.golden.curves import curve
from tests.golden.rollouts import recorded, replayed

BACKENDS = {
    "deepspeed": ({"module": "deepspeed", "deepspeed": {"stage": 2}}, DEEPSPEED),
    "megatron": ({"module": "megatron"}, MEGATRON),
}
RUNS = [
    pytest.param(
        backend, name, id=f"{backend}-{name}", marks=[mark] if name == "grpo" else [mark, pytest.mark.backends]
    )
    for name in ("grpo", "grpo_kl", "ppo", "dpo", "sft", "sft_images", "grpo_images")
    for backend, (_, mark) in BACKENDS.items()
]


@pytest.mark.parametrize(("backend", "name"), RUNS)
def test_the_curve_is_that_of_fsdp(backend, name, tmp_path):
    # An update without advantages has a gradient of rounding alone, which Adam would make whole steps of.
    steady = {"optimizer": {"lr": 3e-3, "eps": 1e-3}}
    (tmp_path / "other").mkdir()
    with recorded() as rollouts:
        expected = curve(name, tmp_path, steady)
    with replayed(rollouts):
        found = curve(name, tmp_path / "other", steady | BACKENDS[backend][0])
    for key, values in expected.items():
        assert found[key] == pytest.approx(values, rel=1e-4, abs=1e-6), key
