"""megatron-core reads and writes checkpoints, on CPUs: `python -m packages.megatron.tests.convert.mcore JOBS.json`.

A job is a Hugging Face directory, a mesh of RANKS ranks, a torch_dist folder to load and one to save into. The model of
each rank has to hold, bit for bit, what coalign_megatron.families says.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import torch

from coalign.files import read_model_config
from coalign_megatron import families
from coalign_megatron.convert.huggingface import HuggingFaceReader
from coalign_megatron.layouts.megatron import MegatronLayout, Mesh, split_layers
from coalign_megatron.layouts.shards import cut

RANKS = 4
SAME = ["num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"]
SAME += ["normalization", "gated_linear_unit", "add_bias_linear", "add_qkv_bias"]
EXPERTS = ["num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size"]


def run(rank: int, jobs: list[dict[str, Any]], store: str) -> None:
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # What megatron-core 0.16 asks of CUDA when it saves, and when it ties weights over stages.
    torch.Tensor.cuda = lambda self, *_: self
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    # Else each rank starts a fresh interpreter for a queue.
    filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    for job in jobs:
        mesh = Mesh(**job["mesh"])
        parallel_state.initialize_model_parallel(
            mesh.tensor,
            mesh.pipeline,
            expert_model_parallel_size=mesh.expert,
            expert_tensor_parallel_size=mesh.expert_tensor,
        )
        load_and_save(job, mesh, rank)
        torch.distributed.barrier()
        parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def load_and_save(job: dict[str, Any], mesh: Mesh, rank: int) -> None:
    from megatron.core import dist_checkpointing

    hf = Path(job["hf"])
    wanted = held(hf, mesh, rank)
    model = built(families.find_family(read_model_config(hf)).config(read_model_config(hf)), mesh, rank)
    for tensor in model.state_dict().values():
        if isinstance(tensor, torch.Tensor):
            tensor.fill_(torch.nan)  # what is not loaded is found
    model.load_state_dict(dist_checkpointing.load({"model": model.sharded_state_dict()}, job["load"])["model"])
    found = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    assert found.keys() == wanted.keys(), f"{job}, rank {rank}: {found.keys() ^ wanted.keys()}"
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), f"{job}, rank {rank}: {name}"
    dist_checkpointing.save({"model": model.sharded_state_dict()}, job["save"])


def held(hf: Path, mesh: Mesh, rank: int) -> dict[str, torch.Tensor]:
    """What the rank's model has, from the Hugging Face tensors."""
    family = families.find_family(read_model_config(hf))
    config = family.config(read_model_config(hf))
    reader, sources = HuggingFaceReader(hf, pickled=False), family.sources(config)
    parameters = family.parameters(config, vocab_divisor=128 * mesh.tensor)
    layout = MegatronLayout(config, mesh, split_layers(config.num_layers, mesh.pipeline))
    return dict(cut(lambda name: sources[name].read(reader.tensor(name)), layout.shards(parameters, mesh.at(rank))))


def built(config: Any, mesh: Mesh, rank: int) -> torch.nn.Module:
    """megatron-core's model with the local spec, of families that it has as they are."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings = TransformerConfig(
        **{name: getattr(config, name) for name in SAME + EXPERTS * bool(config.num_moe_experts)},
        tensor_model_parallel_size=mesh.tensor,
        pipeline_model_parallel_size=mesh.pipeline,
        expert_model_parallel_size=mesh.expert,
        expert_tensor_parallel_size=mesh.expert_tensor,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )
    stage = mesh.at(rank).pipeline[0]
    padded = -(-config.vocab_size // (128 * mesh.tensor)) * 128 * mesh.tensor
    return GPTModel(
        settings,
        get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization=config.normalization),
        vocab_size=padded,
        max_sequence_length=config.max_position_embeddings,
        pre_process=stage == 0,
        post_process=stage == mesh.pipeline - 1,
        share_embeddings_and_output_weights=config.share_embeddings_and_output_weights,
        position_embedding_type="rope",
    )


if __name__ == "__main__":
    import megatron.core.dist_checkpointing
    import megatron.core.models.gpt  # noqa: F401  imported once: the ranks are forked from here

    listed = Path(sys.argv[1])
    arguments = (json.loads(listed.read_text()), str(listed.with_name("store")))
    torch.multiprocessing.start_processes(run, arguments, nprocs=RANKS, start_method="fork")
