"""Every recipe ends with the same weights if its run is stopped and goes on."""

from __future__ import annotations

from functools import partial

import pytest

from tests.recipes import test_offline, test_on_policy_distillation, test_online, test_online_pairs, test_rlaif
from tests.runs import metrics, run, run_in_two_parts, weights_hash

OFFLINE = {
    name: partial(test_offline.configuration, algorithm=name, steps=4, eval_at_start=False)
    for name in test_offline.RECIPES
}
MODULES = {
    "on_policy_distillation": test_on_policy_distillation,
    "online_dpo": test_online_pairs,
    "rlaif": test_rlaif,
}
ONLINE = {name: partial(module.configuration, steps=4, save_every=2) for name, module in MODULES.items()}
ONLINE |= {name: partial(test_online.tricks, algorithm=name) for name in ("ppo", "remax")}
QUICK = ("ppo",)  # it has most that a checkpoint must keep


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in OFFLINE | ONLINE]
)
def test_a_stopped_run_ends_with_the_same_weights(tmp_path, name):
    whole = (OFFLINE | ONLINE)[name](tmp_path)
    run(whole)
    cut = run_in_two_parts(whole)
    assert weights_hash(cut, 4) == weights_hash(whole, 4)
    for key in ("step", "reward/mean", "kl"):
        assert [line.get(key) for line in metrics(cut)] == [line.get(key) for line in metrics(whole)]
