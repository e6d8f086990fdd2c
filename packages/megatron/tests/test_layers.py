"""Which layers a model gets: with Transformer Engine as far as that can be seen without it."""

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core import parallel_state
from megatron.core.extensions import transformer_engine_spec_provider as provider
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TELinear,
    TENorm,
)
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.transformer_layer import TransformerLayer

from coalign_megatron import families
from coalign_megatron.backend import model as layers
from coalign_megatron.backend.attention import LatentAttention, PackedAttention
from coalign_megatron.backend.build import create_transformer_config
from coalign_megatron.backend.model import ExpertGroupChoice, PackedNorm, ParallelLayer
from coalign_megatron.backend.partition import ParallelSizes
from packages.megatron.tests.weight_families.checkpoints import checkpoint


def block(case):
    hf, _ = checkpoint(case)
    model = families.find_family(hf).config(hf)
    return layers.build_block(model, create_transformer_config(model, ParallelSizes(), te=True), te=True)


def test_transformer_engine_is_refused_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(layers, "find_spec", lambda name: None)
    with pytest.raises(NotImplementedError, match="transformer_engine, which needs a GPU, is not installed here"):
        block("llama")


@pytest.fixture
def engine(monkeypatch):
    """As if it were installed: its layers have classes without it, but cannot be built."""
    monkeypatch.setattr(layers, "find_spec", lambda name: object())
    monkeypatch.setattr(gpt_layer_specs, "TESpecProvider", provider.TESpecProvider, raising=False)
    monkeypatch.setattr(gpt_layer_specs, "TENorm", TENorm, raising=False)
    monkeypatch.setattr(provider, "is_te_min_version", lambda version: True)
    monkeypatch.setattr(provider, "TEColumnParallelGroupedLinear", object())  # as those of new versions
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: 0)


def test_norms_are_in_the_linear_layers_of_transformer_engine(engine):
    found = block("qwen3")
    parts = found.layer_specs[0].submodules
    attention = parts.self_attention.submodules
    assert found.layer_specs[0].module is TransformerLayer and found.layer_norm is TENorm
    assert attention.core_attention.module is PackedAttention
    assert attention.linear_qkv is TELayerNormColumnParallelLinear and attention.q_layernorm is TENorm
    assert parts.mlp.submodules.linear_fc1 is TELayerNormColumnParallelLinear
    assert parts.input_layernorm is IdentityOp and parts.pre_mlp_layernorm is IdentityOp


@pytest.mark.parametrize(
    ("case", "norm", "of_mlp", "layer"),
    [
        ("falcon_7b", TENorm, IdentityOp, ParallelLayer),
        ("gpt_neox", TENorm, TENorm, ParallelLayer),
        ("galactica", PackedNorm, PackedNorm, TransformerLayer),
    ],
)
def test_norms_stand_alone_where_they_feed_two_layers_or_have_no_weights(engine, case, norm, of_mlp, layer):
    found = block(case)
    parts = found.layer_specs[0].submodules
    assert found.layer_specs[0].module is layer
    assert parts.self_attention.submodules.linear_qkv is TEColumnParallelLinear
    assert parts.mlp.submodules.linear_fc1 is TEColumnParallelLinear
    modules = [getattr(spec, "module", spec) for spec in (parts.input_layernorm, parts.pre_mlp_layernorm)]
    assert modules == [norm, of_mlp]
    assert getattr(found.layer_norm, "module", found.layer_norm) is norm


def test_latent_attention_and_experts_of_transformer_engine(engine):
    dense, moe = block("deepseek_v3").layer_specs
    attention = moe.submodules.self_attention
    assert attention.module is LatentAttention and attention.submodules.linear_kv_down_proj is TELinear
    assert dense.submodules.mlp.submodules.linear_fc1 is TELayerNormColumnParallelLinear
    assert moe.submodules.pre_mlp_layernorm is TENorm
    assert moe.submodules.mlp.submodules.experts.module is TEGroupedMLP


def test_groups_of_experts_are_judged_by_as_many_as_the_family_says():
    scores = torch.tensor([[0.9, 0.1, 0.0, 0.6, 0.5, 0.2]])  # groups of three: the best one alone, and two of one
    assert ExpertGroupChoice(1).get_replay_topk(scores, 2, 2, 1, None)[1].tolist() == [[0, 1]]
    values, experts = ExpertGroupChoice(2).get_replay_topk(scores, 2, 2, 1, None)
    assert experts.tolist() == [[3, 4]] and values.tolist() == [[pytest.approx(0.6), 0.5]]
