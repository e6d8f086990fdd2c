"""Qwen2.5-VL under Megatron: checkpoints, exports and conversions with the tower, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText
from typer.testing import CliRunner

pytest.importorskip("megatron.core")

from coalign.backends.pretrained import _save_model
from coalign.cli import app
from coalign.config.schema import ModelConfig
from coalign_megatron.backend.module import MegatronModule
from coalign_megatron.families import find_family
from packages.megatron.tests.convert.made import same, stored
from tests.conformance.backends import Backend, build, exported
from tests.conformance.test_image_layouts import make_batch
from tests.vision import vision_model_dir

STEADY = {"lr": 1e-2, "eps": 1e-3}
pytestmark = pytest.mark.backends


def start(model: Path, **config: Any) -> Any:
    own = {"vision": {}, "optimizer": STEADY, "max_tokens_per_micro": 260} | config
    return build(Backend("one", "megatron"), str(model), **own)


def convert(*words: Any) -> str:
    result = CliRunner().invoke(app, ["convert", *map(str, words)])
    assert result.exit_code == 0, result.output
    return " ".join(result.stderr.split())


def test_a_checkpoint_goes_on_bit_for_bit_and_becomes_what_transformers_reads(tmp_path):
    model = vision_model_dir(tmp_path / "model")
    batch = make_batch(tmp_path / "images", model)
    trainer = start(model)
    trainer.train_step(batch)
    trainer.save(tmp_path / "checkpoint")
    trainer.save_hf(tmp_path / "hf")
    middle = exported(trainer)
    trainer.train_step(batch)
    ended = exported(trainer)
    trainer.close()
    again = start(model)
    again.load(tmp_path / "checkpoint")
    again.train_step(batch)
    torch.testing.assert_close(exported(again), ended, rtol=0, atol=0)
    again.close()
    auto = AutoModelForImageTextToText
    loaded, info = auto.from_pretrained(tmp_path / "hf", dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()) and (tmp_path / "hf" / "preprocessor_config.json").is_file()
    torch.testing.assert_close(dict(loaded.named_parameters()), middle, rtol=0, atol=0)
    convert(tmp_path / "checkpoint", "--hf", model, "-o", tmp_path / "converted", "--to", "hf")
    same(stored(tmp_path / "converted"), stored(tmp_path / "hf"))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_a_conversion_there_and_back_is_bit_for_bit(family, tmp_path):
    model = vision_model_dir(tmp_path / "model", family)
    there = convert(model, "-o", tmp_path / "dist", "--to", "megatron", "--tp", 2, "--verify")
    back = convert(tmp_path / "dist", "-o", tmp_path / "back", "--to", "hf", "--verify")
    for told in (there, back):
        assert "transformers and megatron-core compute the same" in told
    same(stored(tmp_path / "back"), stored(model))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"vision": None}, "a vision-language model, which `megatron` trains with images alone"),
        ({"vision": {"tower_lr_scale": 0.5}}, r"vision\.tower_lr_scale is 0\.5: Megatron's optimizer has one rate"),
        ({"vision": {"language": "freeze"}}, r"vision\.language is freeze: under `megatron` the language model learns"),
        ({"lora": {"rank": 2}}, r"models\.model\.lora: adapters of Megatron's layers are not for models that read"),
    ],
)
def test_what_it_cannot_do_is_refused_by_its_key(config, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        start(vision_model_dir(tmp_path / "model"), **config)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_tied_head_learns_what_fsdps_does(family, tmp_path):
    model = vision_model_dir(tmp_path / "model", family)
    whole = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    whole.config.tie_word_embeddings = True
    whole.tie_weights()
    _save_model(whole, model)
    assert "lm_head.weight" not in load_file(model / "model.safetensors")
    batch, done = make_batch(tmp_path / "images", model), []
    for module in ("fsdp", "megatron"):
        trainer = build(Backend(module, module), str(model), vision={}, optimizer=STEADY, max_tokens_per_micro=260)
        logprobs = trainer.forward_step(batch)["ref_logprobs"]
        trainer.train_step(batch)
        done.append((logprobs, exported(trainer)))
        trainer.close()
    (before, weights), (again, found) = done
    torch.testing.assert_close(again, before, rtol=0, atol=1e-5)
    torch.testing.assert_close(found, {name: weights[name] for name in found}, rtol=1e-5, atol=1e-5)


def test_a_flat_config_json_means_the_same(tmp_path):
    """As the files of Qwen2.5-VL on the hub have it."""
    hf = json.loads((vision_model_dir(tmp_path / "model", weights=False) / "config.json").read_text())
    text = hf["text_config"]
    rope = {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}
    others = {key: value for key, value in text.items() if key not in ("rope_parameters", "model_type")}
    flat = {**others, **{key: value for key, value in hf.items() if key != "text_config"}, **rope}
    assert find_family(flat).config(flat) == find_family(hf).config(hf)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"activation_checkpointing": "full"}, "activation_checkpointing is full: the first 2 layers"),
        ({"pipeline_parallel": 2, "num_process": 2}, "gives the first stage 1 layers: the first 2 add features"),
    ],
)
def test_deepstack_has_its_layers_on_the_first_stage_and_computed_once(config, message, tmp_path):
    model = vision_model_dir(tmp_path / "model", "qwen3_vl", weights=False)
    hf = json.loads((model / "config.json").read_text())
    hf["vision_config"]["deepstack_visual_indexes"] = [0, 1]
    (model / "config.json").write_text(json.dumps(hf))
    own = ModelConfig(module="megatron", load=str(model), vision={}, **config)
    with pytest.raises(ValueError, match=message):
        MegatronModule.check_architecture(own, "model")


def test_a_family_whose_tower_it_does_not_know_is_refused_by_its_name(tmp_path):
    model = vision_model_dir(tmp_path / "model", "qwen3_vl_moe", weights=False)
    config = ModelConfig(module="megatron", load=str(model), vision={})
    with pytest.raises(ValueError, match="no family of Megatron models is known for 'qwen3_vl_moe'"):
        MegatronModule.check_architecture(config, "model")
