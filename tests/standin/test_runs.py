"""Whole runs of the recipes on cards of one process: they learn what they learn on the CPU."""

import math

import pytest

from coalign.cluster.placement import nodes
from coalign.cluster.placement.nodes import _Accelerator
from tests import runs

pytestmark = pytest.mark.device
PARTS = ["weights", "gradients", "optimizer", "kv"]


@pytest.fixture(autouse=True)
def _cards(monkeypatch):
    monkeypatch.setitem(nodes.ACCELERATORS, "GPU", _Accelerator("standin", "STANDIN_VISIBLE_DEVICES"))


def on_cards(config, name, **runtime):
    """The same run with every model on a card."""
    models = {model: {**settings, "num_gpu": 1} for model, settings in config["models"].items()}
    output = f"{config['output']}_{name}"
    return config | {"models": models, "output": output, "runtime": config["runtime"] | runtime}


def compare(config, other, tolerance=1e-4):
    """Losses, gradient norms, rewards and lengths of all steps."""
    for own, theirs in zip(runs.metrics(config), runs.metrics(other), strict=True):
        names = [n for n in theirs if n.startswith(("loss/", "reward/", "tokens/", "samples/")) and n in own]
        assert "loss/value" not in theirs or "loss/value" in names
        for name in names:
            if theirs[name] is None:
                assert own[name] is None
                continue
            assert own[name] == pytest.approx(theirs[name], rel=tolerance, abs=tolerance), (own["step"], name)


OFFLINE = [
    *("sft", "dpo", "pretrain", "reward_model", "kto"),
    *("orpo", "simpo", "process_reward", "distill", "conditional_sft"),
]
ONLINE = ["grpo", "ppo", "rloo", "remax", "gspo", "dapo", "cispo", "reinforce_pp", "online_dpo"]


@pytest.mark.parametrize("algorithm", OFFLINE + ONLINE)
def test_recipes_on_cards_of_their_own(tmp_path, algorithm):
    config = runs.settings(tmp_path, algorithm, steps=3)
    if algorithm == "pretrain":
        config["runtime"]["tokens_per_step"] = 200
    cards = on_cards(config, "cards")
    assert runs.run(config) == runs.run(cards) == 0
    compare(cards, config)


@pytest.mark.parametrize("offload", [[], PARTS], ids=["stays", "leaves"])
def test_grpo_on_one_card_that_all_models_share(tmp_path, offload):
    config = runs.settings(tmp_path, "grpo", steps=3)
    config["models"]["reference"] = {}
    config["loss"] = {"fn": "policy_gradient", "kl_coef": 0.1}
    for model in config["models"].values():
        model["offload"] = offload
    cards = on_cards(config, "cards", colocation=[["policy", "trainer", "reference"]])
    assert runs.run(config) == runs.run(cards) == 0
    compare(cards, config)
    if offload:
        assert runs.metrics(cards)[-1]["swaps/trainer/out"] >= 1.0


def test_generation_beside_training(tmp_path):
    """Weights arrive in the middle of responses: which tokens they choose depends on the clock."""
    config = on_cards(runs.settings(tmp_path, "grpo", steps=4, max_staleness=1, eval_at_start=False), "cards")
    assert runs.run(config) == 0
    lines = runs.metrics(config)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["samples/staleness_max"] <= 1 and math.isfinite(line["loss/grad_norm"]) for line in lines)


def test_a_run_that_was_stopped_goes_on_to_the_same_weights(tmp_path):
    config = on_cards(runs.settings(tmp_path, "grpo", steps=4, save_every=2), "cards")
    assert runs.run(config) == 0
    again = runs.run_in_two_parts(config)
    assert runs.weights_hash(again, 4) == runs.weights_hash(config, 4)
