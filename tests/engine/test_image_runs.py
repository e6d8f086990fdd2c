"""Whole runs that read images: resumed, on Ray, of many algorithms, and what they leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from coalign import load_config
from coalign.backends.hf.fsdp import FSDPModule
from coalign.config.schema import ModelConfig, VisionConfig
from coalign.launch.plan import prepare
from tests.backends.test_images import answer, build_trainer, load_prompts
from tests.runs import metrics, run, run_in_two_parts, run_to_end, samples
from tests.runs import settings as text_settings
from tests.tiny import tiny_model_dir
from tests.vision import let_see, picture, vision_model_dir


@pytest.fixture
def settings(tmp_path):
    """Make the configuration of a run of a few seconds on twelve rows, of which every third is text alone."""

    def make(algorithm: str, **runtime: Any) -> dict[str, Any]:
        config = text_settings(tmp_path, algorithm, **{"save_every": 2, "eval_at_start": False} | runtime)
        let_see(config, tmp_path)
        config["models"]["trainer"]["optimizer"] |= {"eps": 1e-3}
        if algorithm == "grpo":
            config["loss"] = {"fn": "policy_gradient", "kl_coef": 0.05}
            config["models"]["policy"]["sampling"] = {"max_new_tokens": 4}
        return config

    return make


def read_weights(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    return load_file(Path(config["output"]) / "model" / "model.safetensors")


@pytest.mark.parametrize(
    "algorithm", ["sft", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dpo", "grpo"))]
)
def test_a_run_goes_on_where_it_was_and_exports_the_whole_model(algorithm, settings, tmp_path):
    config = settings(algorithm)
    assert run(config) == 0
    again = run_in_two_parts(config)
    whole, found = read_weights(config), read_weights(again)
    torch.testing.assert_close(found, whole, rtol=0, atol=0)
    before = load_file(tmp_path / "seeing" / "model.safetensors")
    assert before.keys() == whole.keys()
    moved = [name for name in whole if not torch.equal(whole[name], before[name])]
    assert {True, False} == {name.startswith("visual.") for name in moved}
    folder = Path(config["output"]) / "model"
    _, info = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()) and (folder / "preprocessor_config.json").is_file()
    if algorithm == "grpo":
        seen = next(sample for sample in samples(config) if "images" in sample)
        assert seen["images"] == seen["row"]["images"] and seen["prompt"].count("<|image_pad|>") == 1


@pytest.mark.backends
def test_ray_computes_what_one_process_does(settings, tmp_path):
    pytest.importorskip("ray")
    config = settings("grpo")
    own = config | {"output": str(tmp_path / "ray"), "runtime": config["runtime"] | {"cluster": "ray"}}
    assert run(config) == run(own) == 0
    for one, other in zip(metrics(config), metrics(own), strict=True):
        for key in ("loss/value", "loss/grad_norm", "loss/kl_ref", "reward/mean", "tokens/trained"):
            assert other[key] == pytest.approx(one[key], rel=1e-5, abs=1e-6), key


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["kto", "orpo", "simpo", "online_dpo", "on_policy_distillation"])
def test_other_algorithms_learn_from_images(algorithm, settings, tmp_path):
    config = settings(algorithm, steps=2)
    if "teacher" in config["models"]:
        config["models"]["teacher"]["load"] = str(vision_model_dir(tmp_path / "another", seed=5))
    assert all(0 < line["loss/grad_norm"] < float("inf") for line in run_to_end(config))
    before, after = load_file(tmp_path / "seeing" / "model.safetensors"), read_weights(config)
    for part in ("visual.blocks", "visual.merger", "model.layers"):
        assert any(not torch.equal(after[name], before[name]) for name in before if part in name), part


def test_parts_stay_frozen_and_have_their_own_learning_rates(tmp_path):
    model = vision_model_dir(tmp_path / "model")
    batch = answer(load_prompts(tmp_path, model))

    def move(**vision: Any) -> dict[str, torch.Tensor]:
        """How far the first step moves each parameter that learns."""
        trainer = build_trainer(model, vision=vision, optimizer={"lr": 1e-2})
        before = {name: p.detach().clone() for name, p in trainer.model.model.named_parameters()}
        trainer.train_step(batch)
        after = dict(trainer.model.model.named_parameters())
        assert all(torch.equal(before[name], after[name]) for name in before if name not in trainer.gradients)
        return {name: after[name].detach() - before[name] for name in trainer.gradients}

    whole, halved = move(tower="freeze"), move(tower="freeze", projector_lr_scale=0.5)
    assert whole.keys() == halved.keys() and not any("visual" in name and "merger" not in name for name in whole)
    for name, moved in whole.items():
        scale = 0.5 if "merger" in name else 1.0
        torch.testing.assert_close(halved[name], scale * moved, rtol=1e-3, atol=1e-6)
        assert "k_proj.bias" in name or moved.any(), name


def test_what_reads_no_images_is_refused_by_name(settings, tmp_path):
    def refuse(config: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            prepare(load_config(config))

    blind = settings("sft")
    blind["data"]["images"] = None
    blind["models"]["trainer"]["vision"] = {}
    refuse(blind, r"models\.trainer\.vision: the run reads text alone")
    text = {"load": str(tiny_model_dir(tmp_path / "text")), "head": "reward", "frozen": True}
    with pytest.raises(ValueError, match=r"models\.judge\.load: \w+ reads no images, and data\.images is for models"):
        FSDPModule.check_architecture(ModelConfig(**text, vision=VisionConfig()), "judge")
    stored = settings("grpo")
    stored["models"]["reference"] = {"load": stored["models"]["policy"]["load"], "cache": True}
    refuse(stored, r"models\.reference\.cache")


@pytest.mark.slow
def test_ppo_with_a_reward_model_and_a_value_model_that_see(settings, tmp_path):
    """A reward model is trained on pairs with images; then it rewards a policy, whose value model sees, too."""
    pairs = settings("reward_model")
    pairs["models"]["trainer"] |= {"head_init": "zero"}
    assert run(pairs) == 0
    again = run_in_two_parts(pairs)
    torch.testing.assert_close(read_weights(again), read_weights(pairs), rtol=0, atol=0)
    config = settings("grpo", steps=2)
    model = config["models"]["policy"]["load"]
    config |= {"algorithm": "ppo", "output": str(tmp_path / "ppo"), "reward": {"model": "judge"}}
    config["loss"] = {"fn": "policy_gradient"}
    config["models"] |= {
        "judge": {"load": str(Path(pairs["output"]) / "model"), "head": "reward"},
        "value": {"load": model, "head_init": "zero", "optimizer": {"lr": 1e-2}},
    }
    last = run_to_end(config)[-1]
    assert last["reward/std"] > 0 and last["loss/grad_norm"] > 0 and last["value/loss/grad_norm"] > 0, last


@pytest.mark.slow
def test_a_judge_that_sees_rewards_what_an_environment_has_shown(settings, tmp_path):
    config = settings("grpo", steps=2)
    judge = {"fn": "pairwise", "template": "{prompt} {first} or {second}?"}
    config |= {"algorithm": "rlaif", "reward": {"model": "judge"}}
    config["loss"] = {"fn": "policy_gradient"}
    config["models"]["judge"] = {
        "load": str(vision_model_dir(tmp_path / "judge", "gemma3", seed=3)),
        "chat_template": "auto",
        "module": "preference",
        "judge": judge,
    }
    shown = picture(tmp_path / "shown.png", (32, 40), 5)
    config["rollout"] = {"fn": "tests.environments.test_images:look_twice", "url": str(shown), "file": str(shown)}
    config["models"]["policy"]["sampling"] = {"max_new_tokens": 9}
    last = run_to_end(config)[-1]
    assert last["loss/grad_norm"] > 0 and last["reward/std"] > 0 and last["episode/turns"] == 3, last
    assert all(str(shown) in sample["images"] for sample in samples(config))


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_continuous_roll_outs_go_on_with_images(kv, settings):
    """When new weights come depends on time, so only synchronous runs end with the same bits. But every group is
    trained on once, with its images, as in runs on text."""
    config = settings("grpo", max_staleness=2, log_samples=99)
    config["rollout"] = {"kv": kv}
    config = run_in_two_parts(config)
    lines = metrics(config)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    trained = [own for own in samples(config) if own["phase"] == "train"]
    steps: dict[int, set[int]] = {}
    for own in trained:
        steps.setdefault(own["group"], set()).add(own["step"])
        assert bool(own.get("images")) == bool(own["row"]["images"])
    assert sorted(steps) == list(range(16)) and all(len(each) == 1 for each in steps.values())
    assert len(trained) == 64
    assert all(line["loss/grad_norm"] > 0 and line["samples/dropped"] == 0 for line in lines)


@pytest.mark.slow
def test_partial_roll_outs_go_on_with_images_from_a_checkpoint(settings):
    config = settings("grpo") | {"rollout": {"round_tokens": 2}}
    assert run(config) == 0
    again = run_in_two_parts(config)
    torch.testing.assert_close(read_weights(again), read_weights(config), rtol=0, atol=0)
