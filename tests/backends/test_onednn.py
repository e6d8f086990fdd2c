"""Linear layers by oneDNN compute what torch's do, forward and backward, and only the larger ones are replaced."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from coalign.backends.engines.native import kernels
from coalign.backends.hf import linear_layers as layers
from tests.backends.batches import rollout
from tests.backends.test_fsdp import Watched, module
from tests.tiny import tiny_model_dir

STILL = {"kind": Watched, "optimizer": {"lr": 0.0}}  # AdamW would make steps of rounding


@pytest.mark.parametrize("shape", [(7,), (2, 5)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_outputs_and_gradients_are_those_of_float64(shape, has_bias):
    torch.manual_seed(0)
    leaves = [torch.randn(*shape, 24), torch.randn(40, 24), torch.randn(40) if has_bias else None]
    grad = torch.randn(*shape, 40)
    results = []
    for product, dtype in ((F.linear, torch.float64), (layers._OneDNNLinear.apply, torch.float32)):
        own = [None if leaf is None else leaf.to(dtype, copy=True).requires_grad_() for leaf in leaves]
        output = product(*own)
        output.backward(grad.to(dtype))
        results.append([output, *(leaf.grad for leaf in own if leaf is not None)])
    for exact, found in zip(*results, strict=True):
        torch.testing.assert_close(found, exact.float(), rtol=1e-5, atol=1e-5)


def test_a_trainer_uses_it_where_it_is_faster(tmp_path, monkeypatch):
    path, batch, gradients = str(tiny_model_dir(tmp_path)), rollout(), []
    monkeypatch.setattr(layers, "ONEDNN_ELEMENTS", 1)
    for is_faster in (False, True):
        monkeypatch.setattr(kernels, "is_onednn_faster", lambda is_faster=is_faster: is_faster)
        trainer = module(path, **STILL)
        replaced = [each for each in trainer.model.modules() if isinstance(each.__dict__.get("forward"), partial)]
        assert bool(replaced) == is_faster
        trainer.train_step(batch)
        gradients.append(trainer.gradient)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("setting", [{"compute_dtype": "bfloat16"}, {"dtype": "bfloat16"}])
def test_other_dtypes_stay_with_torch(tmp_path, monkeypatch, setting):
    monkeypatch.setattr(layers, "ONEDNN_ELEMENTS", 1)
    monkeypatch.setattr(kernels, "is_onednn_faster", lambda: True)
    monkeypatch.setattr(kernels, "has_bf16", lambda: True)
    trainer = module(str(tiny_model_dir(tmp_path)), **setting)
    assert not any("forward" in each.__dict__ for each in trainer.model.modules())
