"""Products in 8-bit floats: who is refused, which layers are chosen, and what torchao makes of them (emulated)."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from coalign.backends.hf import linear_layers as layers
from coalign.backends.hf.plans import decoder_layers
from coalign.config.schema import ModelConfig
from tests.backends.batches import rollout
from tests.backends.test_fsdp import Watched, module
from tests.conformance.layouts import MODELS
from tests.tiny import tiny_model_dir

KEY = "models.trainer.fp8"
BF16 = {"compute_dtype": "bfloat16"}


def layer(path) -> torch.nn.Module:
    with torch.device("meta"):
        return decoder_layers(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)))[0]


def test_where_it_cannot_be_is_refused(monkeypatch):
    capability, package = (8, 6), object()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(layers, "find_spec", lambda name: package)
    with pytest.raises(ValueError, match=rf"{KEY} needs a GPU of .* capability 8\.9 or more; that of cuda is 8\.6"):
        layers.check_float8(torch.device("cuda"), KEY)
    for newer in ((8, 9), (10, 0)):
        capability = newer
        layers.check_float8(torch.device("cuda"), KEY)
    package = None
    with pytest.raises(ImportError, match=rf"{KEY} needs torchao: pip install 'coalign\[fp8\]'"):
        layers.check_float8(torch.device("cuda"), KEY)
    for config, message in (({}, "it is float32"), (BF16 | {"lora": {}}, "with `lora`")):
        with pytest.raises(ValueError, match=message):
            ModelConfig(fp8=True, **config)


def test_the_linear_layers_whose_sizes_fit_are_chosen(tmp_path):
    attention = [f"self_attn.{name}_proj" for name in "qkvo"]
    mlp = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    for size, expected in ((48, attention + mlp), (40, attention)):
        path = tiny_model_dir(tmp_path / str(size), intermediate_size=size)
        assert layers._find_float8_layers(layer(path)) == expected


def test_routers_are_not(tmp_path):
    names = layers._find_float8_layers(layer(tiny_model_dir(tmp_path, **MODELS["shared"] | {"num_experts": 16})))
    assert "self_attn.q_proj" in names and not [name for name in names if name.endswith("gate")]
    block = torch.nn.ModuleDict({"gate": torch.nn.Linear(32, 16), "up": torch.nn.Linear(32, 16)})
    assert layers._find_float8_layers(block) == ["up"]


def test_a_step_in_emulation_is_near_that_of_bfloat16_and_names_stay(tmp_path):
    pytest.importorskip("torchao")
    plain, rounded = (module(str(tiny_model_dir(tmp_path)), kind=Watched, **BF16) for _ in range(2))
    layers.convert_to_float8(decoder_layers(rounded.model.model), emulate=True)
    for each in (plain, rounded):
        each.train_step(rollout())
    away = float((rounded.gradient - plain.gradient).norm() / plain.gradient.norm())
    assert 0.01 < away < 0.2
    assert [name for name, _ in rounded.export_weights()] == [name for name, _ in plain.export_weights()]
