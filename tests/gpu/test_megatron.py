"""The Megatron module on a CUDA device, with either kind of layers. No machine of ours has run this yet."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from coalign.backends.base import build_objective
from coalign.config.schema import LossConfig, ModelConfig
from coalign.roles import Context
from tests.backends.batches import rollout
from tests.conformance import reference
from tests.tiny import tiny_model_dir

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("megatron") is None, reason="no megatron-core"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
ENGINE = pytest.mark.skipif(find_spec("transformer_engine") is None, reason="no Transformer Engine")
LAYERS = [False, pytest.param(True, marks=ENGINE)]


def build(path, loss="policy_gradient", **config):
    from coalign_megatron.backend.module import MegatronModule  # and megatron-core

    context = Context(device="cuda:0", loss=build_objective(LossConfig(fn=loss)), samples_per_prompt=4)
    module = MegatronModule(ModelConfig(load=path, module="megatron", **config), context)
    module.setup()
    return module


@pytest.fixture
def path(tmp_path):
    return str(tiny_model_dir(tmp_path / "model", hidden=64))


@pytest.mark.parametrize("engine", LAYERS)
@pytest.mark.parametrize(("compute", "tolerance"), [("float32", 1e-4), ("bfloat16", 3e-2)])
def test_logprobs_agree_with_hugging_face_on_the_cpu(path, engine, compute, tolerance):
    batch = rollout((5, 9, 12), 3)
    model = reference.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    expected = reference.logprobs(model, batch).detach()
    module = build(path, compute_dtype=compute, megatron={"transformer_engine": engine})
    got = module.forward_step(batch)["ref_logprobs"][batch["loss_mask"]]
    assert float((got - expected).norm() / expected.norm()) < tolerance
    module.close()


@ENGINE
@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="no 8-bit floats")
def test_eight_bits_learn_as_bfloat16_does(path):
    batch = rollout((5, 9, 12), 3)
    batch = batch.with_(advantages=torch.where(batch["loss_mask"], 1.0, 0.0))
    curves = []
    for fp8 in (False, True):
        module = build(path, compute_dtype="bfloat16", fp8=fp8, optimizer={"lr": 1e-3}, loss="sft")
        curves.append([module.train_step(batch)["loss/value"].value for _ in range(30)])
        module.close()
    assert curves[0][-1] < 0.9 * curves[0][0]
    assert curves[1][-1] == pytest.approx(curves[0][-1], rel=0.05)
