"""Single samples dealt out to replicas instead of whole prompts: another load, the same samples."""

from __future__ import annotations

import pytest

from tests.engine.test_partial_rollout import partial
from tests.runs import metrics, run, weights_hash


def spread(config, folder, *, cluster="local", processes=1):
    policy, trainer = config["models"]["policy"], config["models"]["trainer"]
    models = {"policy": policy | {"spread_samples": True, "num_process": processes}, "trainer": {"num_process": 1}}
    models["trainer"] = trainer | models["trainer"]
    runtime = config["runtime"] | {"cluster": cluster}
    return config | {"output": str(folder), "models": config["models"] | models, "runtime": runtime}


@pytest.mark.parametrize("rollout", [pytest.param({}, marks=pytest.mark.slow), {"round_tokens": 4}])
def test_spread_samples_are_the_same_samples(tmp_path, rollout):
    together = partial(tmp_path, rollout=rollout, steps=2)
    apart = spread(together, tmp_path / "apart")
    run(together)
    run(apart)
    assert weights_hash(apart, 2) == weights_hash(together, 2)
    assert [line["loss/value"] for line in metrics(apart)] == [line["loss/value"] for line in metrics(together)]


@pytest.mark.slow
def test_on_two_replicas_too(tmp_path):
    together = partial(tmp_path, rollout={}, steps=3, prompts_per_step=4)
    apart = spread(together, tmp_path / "apart", cluster="ray", processes=2)
    run(together)
    run(apart)
    assert weights_hash(apart, 3) == weights_hash(together, 3)
