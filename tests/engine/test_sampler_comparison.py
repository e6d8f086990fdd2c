"""Engines with classes of their own are compared with the trainer before a run samples."""

import re

import pytest

from coalign.backends.engines.transformers import TransformersModule
from coalign.config.schema import ModelConfig
from coalign.roles import Context
from tests.runs import metrics, run, settings, weights_hash
from tests.tiny import tiny_model_dir


class Stranger(TransformersModule):
    """An engine that has not compared itself with anything."""

    compares_itself = False


class Forgetful(Stranger):
    """An engine that does not know one parameter of the model."""

    def load_weights(self, weights, *, version, adopt=False):
        known = ((name, 0 * value if name.endswith("o_proj.weight") else value) for name, value in weights)
        super().load_weights(known, version=version, adopt=False)


def configure(tmp_path, module):
    config = settings(tmp_path, "grpo", steps=2, eval_at_start=False)
    config["models"]["policy"]["module"] = f"tests.engine.test_sampler_comparison:{module}"
    return config


def test_a_run_whose_engine_computes_another_model_does_not_begin(tmp_path):
    config = configure(tmp_path, "Forgetful")
    what = "models.policy.module is `tests.engine.test_sampler_comparison:Forgetful`, which computes"
    with pytest.raises(ValueError, match=f"{re.escape(what)} .*otherwise than transformers does: log-probs differ by"):
        run(config)
    assert metrics(config) == []


def test_the_comparison_changes_no_weight(tmp_path):
    config = configure(tmp_path, "Stranger")
    assert run(config) == 0
    known = config | {"output": str(tmp_path / "known")}
    known["models"] = config["models"] | {"policy": config["models"]["policy"] | {"module": "transformers"}}
    assert run(known) == 0
    assert weights_hash(config, 2) == weights_hash(known, 2)


@pytest.mark.parametrize("module", [Stranger, Forgetful])
def test_an_engine_without_a_trainer_is_compared_with_the_models_own_forward(tmp_path, module):
    config = ModelConfig(load=str(tiny_model_dir(tmp_path / "model", layers=1)))
    policy = module(config, Context(model="policy"))
    policy.setup()
    try:
        if module is Stranger:
            policy.ensure_weights()
        else:
            with pytest.raises(ValueError, match="otherwise than transformers does"):
                policy.ensure_weights()
    finally:
        policy.close()
