"""The names and shapes of a rank are those that megatron-core's own model has there, and ours of every family (local
spec, built on the CPU)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from coalign_megatron import families
from coalign_megatron.layouts.megatron import MegatronLayout, Mesh, split_layers
from packages.megatron.tests.weight_families.checkpoints import CASES, MOE, checkpoint

pytestmark = pytest.mark.backends

# What megatron-core's own layers can be; ALiBi, parallel residuals and the like need others.
STOCK = ["llama", "llama_tied", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "glm4", "starcoder"]
STOCK += ["starcoder_mha", "starcoder2", "gpt2", "opt", "qwen", "baichuan_7b", "chatglm"]
STOCK += ["deepseek_v2", "deepseek_v2_lite", "deepseek_v3"]
SAME = ["num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"]
SAME += ["normalization", "layernorm_epsilon", "qk_layernorm", "gated_linear_unit", "add_bias_linear", "add_qkv_bias"]
EXPERTS = ["num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"]
EXPERTS += ["moe_shared_expert_gate", "moe_router_score_function", "moe_router_pre_softmax", "moe_router_num_groups"]
EXPERTS += ["moe_router_group_topk", "moe_router_enable_expert_bias"]
LATENT = ["multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"]


class NoAttention(nn.Module):
    """In the place of the core attention, which has no parameters."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__()


@pytest.fixture
def place(request, monkeypatch) -> Iterator[tuple[Mesh, int]]:
    """This process as one rank of many: groups that do not communicate."""
    pytest.importorskip("megatron.core")
    from megatron.core import parallel_state
    from megatron.core.transformer import multi_latent_attention
    from torch.testing._internal.distributed.fake_pg import FakeStore

    mesh, rank = request.param
    checkpoint(request.node.callspec.params["case"])  # transformers writes files on the first rank alone
    monkeypatch.setattr(multi_latent_attention, "HAVE_TE", False)  # it takes a stand-in for the real one
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)  # asked of tied weights over stages
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))  # of rotary embeddings
    if torch.distributed.is_initialized():  # left by a test whose model could not be loaded
        torch.distributed.destroy_process_group()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=mesh.size)
    parallel_state.initialize_model_parallel(
        mesh.tensor,
        mesh.pipeline,
        expert_model_parallel_size=mesh.expert,
        expert_tensor_parallel_size=mesh.expert_tensor,
        create_gloo_process_groups=False,
    )
    yield mesh, rank
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def built(config, mesh, rank, vocabulary):
    """megatron-core's model on this rank."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    fields = SAME + EXPERTS * bool(config.num_moe_experts) + LATENT * config.multi_latent_attention
    made = (MLATransformerConfig if config.multi_latent_attention else TransformerConfig)(
        **{name: getattr(config, name) for name in fields},
        **({"moe_layer_freq": list(config.moe_layer_freq)} if config.moe_layer_freq else {}),
        **({"rope_type": "rope"} if config.multi_latent_attention else {}),
        activation_func=nn.functional.silu,
        tensor_model_parallel_size=mesh.tensor,
        pipeline_model_parallel_size=mesh.pipeline,
        expert_model_parallel_size=mesh.expert,
        expert_tensor_parallel_size=mesh.expert_tensor,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
    )
    spec = get_gpt_decoder_block_spec(made, use_transformer_engine=False, normalization=config.normalization)
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = NoAttention
    stage, last = mesh.at(rank).pipeline[0], mesh.pipeline - 1
    return GPTModel(
        made,
        spec,
        vocabulary,
        config.max_position_embeddings,
        pre_process=stage == 0,
        post_process=stage == last,
        share_embeddings_and_output_weights=config.share_embeddings_and_output_weights,
        position_embedding_type="none" if config.multi_latent_attention else config.position_embedding_type,
        rotary_percent=config.rotary_percent,
    )


MESHES = [(Mesh(), 0), (Mesh(tensor=2, pipeline=2), 0), (Mesh(tensor=2, pipeline=2), 3)]
MESHES += [(Mesh(tensor=2, data=2, expert=2, expert_tensor=2), 3), (Mesh(tensor=2, expert=2), 1), (Mesh(tensor=4), 2)]


def ours(config, mesh, rank, vocabulary):
    """Our model on this rank."""
    from megatron.core import tensor_parallel

    from coalign.backends.hf.heads import LanguageModelHead
    from coalign_megatron.backend.build import create_transformer_config
    from coalign_megatron.backend.cpu import on_cpu
    from coalign_megatron.backend.model import PackedGPT
    from coalign_megatron.backend.partition import ParallelSizes

    sizes = ParallelSizes(mesh.tensor, mesh.pipeline, expert=mesh.expert, expert_tensor=mesh.expert_tensor)
    stage = mesh.at(rank).pipeline[0]
    ends = {"first": stage == 0, "last": stage == mesh.pipeline - 1}
    with on_cpu():
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        made = create_transformer_config(config, sizes)
        return PackedGPT(config, made, vocabulary=vocabulary, read=LanguageModelHead(), **ends)


def places(cases):
    return [(case, place) for place in MESHES for case in cases if case in MOE or place[0].expert == 1]


def check(build, case, place):
    mesh, rank = place
    hf, _ = checkpoint(case)
    family = families.find_family(hf)
    config = family.config(hf)
    parameters = family.parameters(config, vocab_divisor=32)
    layout = MegatronLayout(config, mesh, split_layers(config.num_layers, mesh.pipeline))
    held = {shard.name: shard.shape for shard in layout.shards(parameters, mesh.at(rank))}
    model = build(config, mesh, rank, 160)
    beside = ("_extra_state", "local_tokens_per_expert", "inv_freq")
    there = {name: tuple(t.shape) for name, t in model.state_dict().items() if not name.endswith(beside)}
    assert held == there


@pytest.mark.parametrize(("case", "place"), places(STOCK), indirect=["place"], ids=str)
def test_names_and_shapes_are_those_of_megatron_core(case, place):
    check(built, case, place)


@pytest.mark.parametrize(("case", "place"), places(CASES), indirect=["place"], ids=str)
def test_names_and_shapes_are_those_of_our_model(case, place):
    check(ours, case, place)
