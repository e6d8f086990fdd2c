from coalign import load_config
from coalign.config.schema import LoraConfig, ModelConfig
from coalign.launch.plan import find_shared_bases, prepare
from coalign.roles import Scorer, Trainable
from tests.runs import settings

ROLES = {"trainer": Trainable, "reference": Scorer}


def shared(trainer: dict, reference: dict) -> dict[str, str]:
    models = {
        "trainer": ModelConfig(load="model", **trainer),
        "reference": ModelConfig(**{"load": "model", "frozen": True} | reference),
    }
    return find_shared_bases({name: ROLES[name] for name in models}, models)


def test_the_reference_of_adapters_is_what_they_lie_on():
    adapters = {"lora": LoraConfig()}
    assert shared(adapters, {}) == {"reference": "trainer"}
    assert shared(adapters, adapters) == {"reference": "trainer"}  # `like: trainer` brings the section along


def test_a_model_of_its_own_where_the_weights_differ():
    adapters = {"lora": LoraConfig()}
    assert shared({}, {}) == {}
    assert shared(adapters, {"load": "another"}) == {}
    assert shared(adapters, {"dtype": "bfloat16"}) == {}
    assert shared(adapters, {"cache": "somewhere"}) == {}
    trained = {"lora": LoraConfig(load="adapter")}
    assert shared(trained, {}) == {}
    assert shared(adapters, trained) == {}


def test_a_reference_without_its_trainer_has_weights_of_its_own(tmp_path):
    config = settings(tmp_path, "grpo")
    config["loss"] = {"fn": "policy_gradient", "kl_coef": 0.1}
    config["models"]["trainer"]["lora"] = {"rank": 2}
    plan = prepare(load_config(config))
    assert plan.models["reference"].base_of == "trainer" and "reference" not in plan.started
    assert "reference" in plan.restrict(["reference"]).started
    assert "reference" not in plan.restrict(["trainer", "reference"]).started
