"""Experts under both names: one tensor for each, and one for all."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from coalign.config.schema import ModelConfig
from coalign.roles import Context
from coalign_vllm.stored_names import StoredNames
from tests.backends.batches import prompts, rollout
from tests.backends.test_fsdp import module
from tests.backends.test_routers import FAMILIES, paths  # noqa: F401  (a fixture)
from tests.conformance.backends import MEGATRON
from tests.conformance.engines import SMALL
from tests.tiny import tiny_model_dir

BACKENDS = ["fsdp", pytest.param("megatron", marks=[MEGATRON, pytest.mark.backends])]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("names", ["separate", "stacked"])
def test_transformers_reads_what_is_exported(paths, tmp_path, backend, family, names):  # noqa: F811
    if backend == "megatron":
        from coalign_megatron.backend.module import MegatronModule as Kind
    else:
        from coalign.backends.hf.fsdp import FSDPModule as Kind
    trainer = module(paths(family), export_experts=names, kind=Kind)
    trainer.train_step(rollout((5, 9), 2))
    trainer.save_hf(tmp_path)
    stored = {name for file in Path(tmp_path).glob("*.safetensors") for name in load_file(file)}
    assert any(name.endswith("experts.gate_up_proj") for name in stored) == (names == "stacked")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    found = model.state_dict()
    for name, weight in trainer.export_weights():
        torch.testing.assert_close(weight, found[name], rtol=0, atol=0)
    trainer.close()


def test_stored_names_are_those_of_files(paths):  # noqa: F811
    path = paths("mixtral")
    model, files = AutoModelForCausalLM.from_pretrained(path), load_file(Path(path) / "model.safetensors")
    stored = dict(StoredNames(model, Path(path))(model.named_parameters()))
    assert stored.keys() == files.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in files.items())


@pytest.mark.backends
@pytest.mark.skipif(find_spec("vllm") is None, reason="coalign[vllm] is not installed")
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_vllm_computes_with_new_experts(tmp_path, family):
    """Its experts are packed anew; those that did not come again stay as they are."""
    from coalign_vllm.module import VLLMModule

    shape = FAMILIES[family] | {"moe_intermediate_size": 32, "initializer_range": 0.3}
    path = str(tiny_model_dir(tmp_path, family=family, tied=False, hidden=128, **shape))
    trainer, settings = module(path), {"load": path, "vllm": SMALL, "sampling": {"max_new_tokens": 8}}
    policy = VLLMModule(ModelConfig(module="vllm", **settings), Context(model="policy"))
    policy.setup()

    def distance() -> float:
        out = policy.generate(prompts(5, 7), samples=2)
        return float((trainer.forward_step(out)["ref_logprobs"] - out["rollout_logprobs"]).abs().max())

    assert distance() < 1e-4
    trainer.train_step(rollout((5, 9), 2))
    assert distance() > 1e-2
    policy.load_weights(trainer.export_weights(), version=1)
    assert distance() < 1e-4
    policy.load_weights([(n, w) for n, w in trainer.export_weights() if n == "model.norm.weight"], version=2)
    assert distance() < 1e-4
    policy.close()
