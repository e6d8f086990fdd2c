"""Tensor and expert parallelism from the plans in a model of transformers, and the device meshes of one model.

Tensor parallelism comes with sequence parallelism (1909.08053, 2205.05198). Between two blocks (the attention and the
feed-forward block of a layer) each rank has a chunk of the row. A block gathers the row, computes with some heads or
columns, and sums its output over the ranks. So the gradient of a cut weight is complete on its rank, and that of an
uncut weight in a block is summed over the ranks.

Experts are distributed: each rank holds some, and transformers sends tokens to theirs and back by two all-to-alls. No
two ranks have the same token, so any ranks can share experts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from transformers import PreTrainedModel

from coalign.backends.hf import plans
from coalign.backends.hf.heads import PackedModel
from coalign.backends.hf.plans import INPUTS, OUTPUTS, decoder_layers
from coalign.backends.process_group import AllGather, Group, ReduceScatter
from coalign.config.schema import ModelConfig
from coalign.devices import is_accelerator

# A weight that is cut in two ways is gathered in two steps; torch warns of it once for each sharding.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


class RankMeshes:
    """The meshes of a model over all ranks of the default process group. Making one is a collective.

    Neighbouring ranks communicate fastest, so they are numbered along the shards of a layer first (tensor), then the
    chunks of a row (context), the shards of a batch (data), and the copies of the sharded model (replicate).

    The ``context`` × ``tensor`` ranks that compute a row together each hold a chunk of it between two layers, so no two
    ranks have the same token, and every gradient is a sum over all ranks: of uncut weights over the mesh ``full``, of
    weights cut by ``tensor`` or ``expert`` over the shard dimension of ``layers`` or ``experts``. These three meshes
    have a replicate dimension in front. Raises ValueError where the sizes do not divide the ranks.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        world, copies = dist.get_world_size(), config.dp_replicate
        tensor, context, expert = config.tensor_parallel, config.context_parallel, config.expert_parallel
        for key, ways in (("tensor_parallel × context_parallel", tensor * context), ("expert_parallel", expert)):
            if world % (copies * ways):
                raise ValueError(f"{world} ranks do not divide by dp_replicate × {key} = {copies} × {ways}")

        def mesh(**sizes: int) -> DeviceMesh:
            return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

        shards = world // copies
        self.full = mesh(replicate=copies, shard=shards)
        self.layers = mesh(replicate=copies, shard=shards // tensor, tensor=tensor) if tensor > 1 else self.full
        self.experts = mesh(replicate=copies, shard=shards // expert, expert=expert) if expert > 1 else self.full
        # Ranks that compute one row together, and ranks that have other rows.
        self.rows = mesh(data=world // (context * tensor), context=context, tensor=tensor)


def _apply_tensor_parallel(model: PreTrainedModel, layers: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Cut the weights and the computation of ``layers`` (on the meta device) over ``mesh``, which has one dimension.
    Raises ValueError for weights that do not divide."""
    names, plan = {module: name for name, module in model.named_modules()}, plans.read_plan(model)
    for layer, blocks in zip(layers, plans.list_cut_blocks(model, layers), strict=True):
        for block in blocks:
            for module in block.modules():
                if (style := plans.find_style(names[module], plan)) in (OUTPUTS, INPUTS):
                    for path, layer_module in module.named_modules():
                        for name in dict(layer_module.named_parameters(recurse=False)):
                            _distribute(layer_module, name, mesh, _placement(style, path.split("."), name))
            _exchange_row(block, mesh.get_group())
        for module in layer.modules():
            _keep_whole(module, mesh)


def _placement(style: str, path: list[str], name: str) -> Shard | Replicate:
    """The placement of a parameter at ``path`` in a linear layer. An adapter's A has the layer's inputs, its B the
    outputs."""
    outputs, inputs = "lora_A" not in path, "lora_B" not in path
    if style == OUTPUTS:
        return Shard(0) if outputs else Replicate()
    return Shard(1) if inputs and name == "weight" else Replicate()


def _keep_whole(module: nn.Module, mesh: DeviceMesh) -> None:
    """Replicate the other parameters of ``module``, and have it compute with local tensors. (Distributed experts do so
    already.)"""
    parameters = dict(module.named_parameters(recurse=False))
    for name in [name for name, p in parameters.items() if not isinstance(p, DTensor)]:
        _distribute(module, name, mesh, Replicate())
    if any(isinstance(p, DTensor) and p.device_mesh == mesh for p in module.parameters(recurse=False)):
        first = mesh.get_local_rank() == 0
        module.forward = partial(_compute_locally, module, module.forward, first)


def _distribute(module: nn.Module, name: str, mesh: DeviceMesh, placement: Shard | Replicate) -> None:
    p = module.get_parameter(name)
    if isinstance(placement, Shard) and p.shape[placement.dim] % mesh.size():
        raise ValueError(f"tensor_parallel is {mesh.size()}, which does not divide {tuple(p.shape)} of {module}")
    placed = distribute_tensor(p.data, mesh, [placement], src_data_rank=None)
    module._parameters[name] = nn.Parameter(placed, requires_grad=p.requires_grad)


def _compute_locally(module: nn.Module, forward: Any, first: bool, *args: Any, **kwargs: Any) -> Any:
    """Call ``forward`` with the rank's local shards of the parameters. Each rank computes a partial gradient of a
    replicated parameter. A bias of an output that is summed over ranks is added by the ``first`` rank alone."""
    parameters = cast(dict[str, Tensor], module._parameters)
    shards = {name: p for name, p in parameters.items() if isinstance(p, DTensor)}
    summed = any(p.placements[0].is_shard(1) for p in shards.values())
    for name, p in shards.items():
        local = p.to_local(grad_placements=[Partial() if p.placements[0].is_replicate() else p.placements[0]])
        parameters[name] = local * 0 if name == "bias" and summed and not first else local
    try:
        return forward(*args, **kwargs)
    finally:
        parameters.update(shards)


def _exchange_row(block: nn.Module, group: Group) -> None:
    """Gather the input row [1, P / k, H] before ``block``, and reduce-scatter its output."""
    forward = block.forward

    def forward_whole_row(*args: Any, **kwargs: Any) -> Any:
        row, *more = args or (kwargs.pop("hidden_states"),)
        out = forward(AllGather.apply(row[0], group)[None], *more, **kwargs)
        row, *more = out if isinstance(out, tuple) else (out,)
        scattered = ReduceScatter.apply(row[0], group)[None]
        return (scattered, *more) if isinstance(out, tuple) else scattered

    block.forward = forward_whole_row


def cut_model(model: PackedModel, ranks: RankMeshes) -> None:
    """Distribute the experts of a model without weights, and cut its layers."""
    if ranks.experts is not ranks.full:
        from transformers.distributed.tensor_parallel import apply_expert_parallelism  # not in every version

        mesh = ranks.experts["expert"]
        apply_expert_parallelism(
            model.model, mesh, cast(Any, None), model.model.ep_plan
        )  # no mesh of tensor parallelism
    if ranks.layers is not ranks.full:
        _apply_tensor_parallel(model.model, decoder_layers(model.model), ranks.layers["tensor"])


def shard_model(model: PackedModel, ranks: RankMeshes, compute_dtype: torch.dtype | None, *, host: bool) -> None:
    """Apply FSDP2 to every decoder layer, separately to its distributed experts, and to the rest. Gradients are summed
    over ranks, not averaged: the loss has global denominators. ``host``: shards stay in the host's memory."""
    offload = CPUOffloadPolicy(pin_memory=is_accelerator(ranks.full.device_type)) if host else OffloadPolicy()
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    experts = plans.find_experts(model.model) if ranks.experts is not ranks.full else []
    groups = [(experts, ranks.experts), (decoder_layers(model.model), ranks.layers)]
    groups += [(plans.tower_layers(model.model), ranks.full), ([model], ranks.full)]
    for module, mesh in ((module, mesh) for modules, mesh in groups for module in modules):
        # With copies, FSDP shards over the second of two dimensions.
        submesh = mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]
        sharded = fully_shard(module, mesh=submesh, mp_policy=precision, offload_policy=offload)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def move_buffers(device: torch.device, module: nn.Module) -> None:
    """Move buffers to where their module computes: they are not sharded."""
    for name, buffer in module.named_buffers(recurse=False):
        module._buffers[name] = buffer.to(device)
