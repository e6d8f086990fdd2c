"""What a check knows of a model by its config.json alone is what transformers makes of it; the rest is left to it."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from torch import nn

from coalign.backends import pretrained
from coalign.backends.engines.native.native_engine import NativeModule
from coalign.backends.hf.checks import is_known
from coalign.backends.hf.fsdp import FSDPModule
from coalign.backends.known_models import HARMLESS, REQUIRED, find_known_model
from coalign.config.schema import ModelConfig
from coalign.weights.model_files import StoredTensor, read_stored
from tests.tiny import tiny_model_dir, tiny_reward_model_dir

BASE = {"vocab": 300, "hidden": 16, "layers": 2}


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def directory(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    return tiny_model_dir(path, family=request.param, **BASE)


def rewrite(directory, path, changes):
    """A directory with the config.json of another and ``changes``; DROP leaves a key out."""
    fields = json.loads((directory / "config.json").read_text()) | changes
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({key: value for key, value in fields.items() if value is not DROP}))
    return ModelConfig(load=str(path))


DROP = object()
ODD = (DROP, None, 0, 1, 2, 3, 7, 8, 24, -1, 0.5, True, False, "x", [], [1], [0, 1], ["full_attention"], {})
ROPES = (
    {"rope_theta": 1e6, "rope_type": "default"},
    {"rope_theta": 1e6, "rope_type": "dynamic", "factor": 2.0},
    {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0},
    {"rope_type": "default"},
)
CHANGES = [
    *({key: value} for key in (*REQUIRED, *HARMLESS) for value in ODD),
    *({"rope_parameters": rope} for rope in ROPES),
    *({"model_type": family} for family in ("llama", "qwen2", "qwen3", "mistral", "gemma2", "t5")),
    *({"hidden_act": name} for name in ("gelu", "relu")),
    *({"layer_types": [kind, "full_attention"]} for kind in ("full_attention", "sliding_attention")),
    {"tie_word_embeddings": False},
    {"rope_theta": 1e5, "rope_parameters": DROP},
    {"quantization_config": {"quant_method": "fp8"}},
    {"auto_map": {"AutoConfig": "x.Y"}},
    {"num_experts": 4},
]


def compare(config):
    """What transformers builds of a known config.json has these tensors, and every check of it passes."""
    known = find_known_model(config)
    assert known is not None
    hf = pretrained.read_config(config)
    assert pretrained.read_context_length(hf) == known.context and pretrained.read_rope_limit(hf) is None
    skeleton = pretrained.build_skeleton(config)
    assert {name: tuple(p.shape) for name, p in skeleton.named_parameters()} == dict(known.shapes)
    linears = [m for m in skeleton.modules() if isinstance(m, nn.Linear)]
    assert dict(known.linears) == Counter((m.in_features, m.out_features) for m in linears)
    assert FSDPModule.build_skeleton(config, "m").rows == "packed"
    model = NativeModule.build_model(hf, config, "cpu")
    model.check()
    assert NativeModule.find_arithmetic(config) == (torch.float32, model.kernel, model.variant_layers)


def test_a_plain_model_is_known(directory):
    compare(ModelConfig(load=str(directory)))


@pytest.mark.slow
def test_what_is_known_is_what_transformers_builds(directory, tmp_path):
    known = 0
    for changes in CHANGES:
        config = rewrite(directory, tmp_path / "changed", changes)
        if find_known_model(config) is not None:
            compare(config)
            known += 1
    assert len(HARMLESS) < known < len(CHANGES) / 3, (known, len(CHANGES))


@pytest.mark.parametrize("change", ["none", "renamed", "reshaped", "missing", "more"])
def test_files_fit_with_the_same_tensors_alone(directory, change):
    config = ModelConfig(load=str(directory))
    known, stored = find_known_model(config), dict(read_stored(directory) or {})
    assert known is not None
    name = "model.layers.1.mlp.up_proj.weight"
    tensor = stored[name]
    if change in ("renamed", "missing"):
        del stored[name]
    if change in ("renamed", "more"):
        stored[name.replace(".1.", ".2.")] = tensor
    if change == "reshaped":
        stored[name] = StoredTensor(tensor.dtype, tensor.shape[::-1])
    assert known.fits(stored, config) == (change == "none")


@pytest.mark.parametrize("head", ["value", "reward"])
def test_heads_fit_as_transformers_loads_them(tmp_path, head):
    language, scored = tiny_model_dir(tmp_path / "lm", **BASE), tiny_reward_model_dir(tmp_path / "rm", **BASE)
    for directory in (language, scored):
        for init in ("load", "zero"):
            config = ModelConfig(load=str(directory), head=head, head_init=init)
            known = find_known_model(config)
            assert known is not None and known.fits(read_stored(directory) or {}, config) == (
                directory == scored or init == "zero"
            )
    bare = ModelConfig(load=str(scored))
    known = find_known_model(bare)
    assert known is not None and not known.fits(read_stored(scored) or {}, bare)


@pytest.mark.parametrize(
    "changes",
    [
        *({"tensor_parallel": 2}, {"context_parallel": 2}, {"expert_parallel": 2}, {"rows": "padded"}),
        *({"lora": {"target": ["nothing"]}}, {"router_aux_loss_coef": 0.1}, {"vision": {}}),
    ],
)
def test_settings_that_depend_on_the_architecture_are_not_taken_for_known(tmp_path, changes):
    config = ModelConfig(load=str(tiny_model_dir(tmp_path / "m", **BASE)))
    assert is_known(config)
    assert not is_known(ModelConfig.model_validate({**config.model_dump(exclude_unset=True), **changes}))
