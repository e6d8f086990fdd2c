"""Tensor and expert parallelism from the plans in a model of transformers, and the device meshes of one model.

Tensor parallelism comes with sequence parallelism (1909.08053, 2205.05198). Between two blocks (the attention and the
feed-forward part of a layer) each rank has a part of the row. A block gathers the row, computes with some heads or
columns, and sums its output over the ranks. So the gradient of a cut weight is complete on its rank, and the gradient
of an uncut weight in a block is summed over the ranks. `check_cuts` refuses what cannot be cut, before loading.

Experts are not cut but distributed: each rank holds some of them, and transformers sends tokens to theirs and back by
two all-to-alls around their forward. No two ranks have the same token, so any ranks can share experts.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from transformers import CONFIG_MAPPING, PreTrainedModel, __version__

from coalign.backends.hf.heads import PackedModel
from coalign.backends.lora import adapts_experts
from coalign.backends.process_group import AllGather, Group, ReduceScatter
from coalign.backends.vision_language import find_body
from coalign.config.schema import ModelConfig
from coalign.devices import is_accelerator

# A weight that is cut in two ways is gathered in two steps; torch warns so for each kind of tensor.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


class RankMeshes:
    """The meshes of a model over all ranks of the default process group. Making one is a collective.

    Neighbouring ranks communicate fastest, so they are numbered along the parts of a layer first (tensor), then the
    parts of a row (context), the parts of a batch (data), and the copies of the sharded model (replicate).

    The ``context`` × ``tensor`` ranks that compute a row together each hold a part of it between two layers, so no two
    ranks have the same token, and every gradient is a sum over all ranks: of uncut weights over the mesh ``whole``, of
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
        self.whole = mesh(replicate=copies, shard=shards)
        self.layers = mesh(replicate=copies, shard=shards // tensor, tensor=tensor) if tensor > 1 else self.whole
        self.experts = mesh(replicate=copies, shard=shards // expert, expert=expert) if expert > 1 else self.whole
        # Ranks that compute one row together, and ranks that have other rows.
        self.rows = mesh(data=world // (context * tensor), context=context, tensor=tensor)

    def sharding(self, mesh: DeviceMesh) -> DeviceMesh:
        """The part of ``mesh`` that FSDP shards over; with copies, over the second of two dimensions."""
        return mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]


DISPATCH, SLICED = "ep_dispatch_experts", "moe_tp_experts"  # styles in the plans of transformers


def find_style(name: str, plan: dict[str, str]) -> str | None:
    """What a model's ``plan``, whose keys are patterns (`layers.*.mlp.up_proj`), says about ``name``."""
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))


# Language models that have no plan in transformers 5.19, and a family whose layers are the same.
SAME_LAYERS = {"qwen3_vl_text": "qwen3"}


def read_plan(model: PreTrainedModel) -> dict[str, str]:
    """Return the model's plan of tensor parallelism, by patterns of full names."""
    relative = SAME_LAYERS.get(model.config.get_text_config().model_type)
    if model.tp_plan or relative is None:
        return model.tp_plan
    body = find_body(model)
    prefix = next(name for name, module in model.named_modules() if module is body)
    plan = CONFIG_MAPPING[relative].base_model_tp_plan or {}
    return {f"{prefix}.{name}": style for name, style in plan.items()}


def find_experts(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that hold the stacked experts of a layer, according to the model's plans."""
    modules, plan = model.named_modules(), read_plan(model)
    return [m for n, m in modules if find_style(n, model.ep_plan) == DISPATCH or find_style(n, plan) == SLICED]


def find_unfit_experts(model: PreTrainedModel, ways: int) -> str | None:
    """Why the experts of a model cannot be distributed over so many ranks; None if they can."""
    experts = [module for name, module in model.named_modules() if find_style(name, model.ep_plan) == DISPATCH]
    if not experts and find_experts(model):
        return f"the plans of transformers {__version__} cut experts and distribute none; those of 5.19 do"
    if not experts:
        return f"{type(model).__name__} has no experts to distribute"
    counts = {cast(int, module.num_experts) for module in experts}
    return None if not any(count % ways for count in counts) else f"it does not divide the {max(counts)} experts"


def apply_expert_parallel(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Distribute the experts (on the meta device) of all layers over ``mesh``, which has one dimension."""
    from transformers.distributed.tensor_parallel import apply_expert_parallelism  # not in every version

    apply_expert_parallelism(model, mesh, cast(Any, None), model.ep_plan)  # no mesh of tensor parallelism


# How a plan of transformers cuts a linear layer: its outputs, its inputs, or not at all. The styles in WHOLE repair
# gradients in transformers' own implementation; here they are right without.
OUTPUTS, INPUTS = "colwise", "rowwise"
WHOLE = {"replicated_with_grad_allreduce", "mla_kv_a_proj"}


def find_unfit_layers(model: PreTrainedModel, layers: Sequence[nn.Module]) -> str | None:
    """Why the plan of a model cannot be applied; None if it can."""
    blocks = [block for found in _cut_blocks(model, layers) for block in found]
    names, plan = {module: name for name, module in model.named_modules()}, read_plan(model)
    styles = {names[module]: find_style(names[module], plan) for block in blocks for module in block.modules()}
    for name, style in styles.items():
        if style not in {OUTPUTS, INPUTS, None} | WHOLE:
            return f"the model's plan cuts '{name}' as `{style}`, which Coalign does not know"
    return None if {OUTPUTS, INPUTS} <= set(styles.values()) else f"{type(model).__name__} brings no plan for it"


def apply_tensor_parallel(model: PreTrainedModel, layers: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Cut the weights and the computation of ``layers`` (on the meta device) over ``mesh``, which has one dimension.
    Raises ValueError for weights that do not divide."""
    names, plan = {module: name for name, module in model.named_modules()}, read_plan(model)
    for layer, blocks in zip(layers, _cut_blocks(model, layers), strict=True):
        for block in blocks:
            for module in block.modules():
                if (style := find_style(names[module], plan)) in (OUTPUTS, INPUTS):
                    _cut(module, style, mesh)
            _exchange_row(block, mesh.get_group())
        for module in layer.modules():
            _keep_whole(module, mesh)


def _cut_blocks(model: PreTrainedModel, layers: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """The blocks of each layer that the plan cuts. One with experts computes each rank's part of the row instead."""
    names, plan = {module: name for name, module in model.named_modules()}, read_plan(model)
    experts = set(find_experts(model))

    def is_cut(block: nn.Module) -> bool:
        inner = set(block.modules())
        return experts.isdisjoint(inner) and any(find_style(names[module], plan) for module in inner)

    return [[block for block in layer.children() if is_cut(block)] for layer in layers]


def _cut(linear: nn.Module, style: str, mesh: DeviceMesh) -> None:
    for path, module in linear.named_modules():
        for name in dict(module.named_parameters(recurse=False)):
            _distribute(module, name, mesh, _placement(style, path.split("."), name))


def _placement(style: str, path: list[str], name: str) -> Shard | Replicate:
    """The placement of a parameter at ``path`` in a linear layer. Of an adapter, A has the layer's inputs, B its
    outputs."""
    outputs, inputs = "lora_A" not in path, "lora_B" not in path
    if style == OUTPUTS:
        return Shard(0) if outputs else Replicate()
    return Shard(1) if inputs and name == "weight" else Replicate()


def _keep_whole(module: nn.Module, mesh: DeviceMesh) -> None:
    """Replicate the other parameters of ``module``, and have it compute with local tensors. (Distributed experts do so
    already.)"""
    own = dict(module.named_parameters(recurse=False))
    for name in [name for name, p in own.items() if not isinstance(p, DTensor)]:
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
    """Call ``forward`` with the rank's own parts of the parameters. A replicated parameter gets a part of its gradient
    on each rank. A bias of an output that is summed over ranks is added by the ``first`` rank alone."""
    own = cast(dict[str, Tensor], module._parameters)
    shards = {name: p for name, p in own.items() if isinstance(p, DTensor)}
    summed = any(p.placements[0].is_shard(1) for p in shards.values())
    for name, p in shards.items():
        local = p.to_local(grad_placements=[Partial() if p.placements[0].is_replicate() else p.placements[0]])
        own[name] = local * 0 if name == "bias" and summed and not first else local
    try:
        return forward(*args, **kwargs)
    finally:
        own.update(shards)


def _exchange_row(block: nn.Module, group: Group) -> None:
    """Gather the input row [1, P / k, H] before ``block``, and reduce-scatter its output."""
    forward = block.forward

    def forward_whole_row(*args: Any, **kwargs: Any) -> Any:
        if args:
            args = (_apply_to_row(AllGather, args[0], group), *args[1:])
        else:
            kwargs["hidden_states"] = _apply_to_row(AllGather, kwargs["hidden_states"], group)
        out = forward(*args, **kwargs)
        if isinstance(out, tuple):
            return _apply_to_row(ReduceScatter, out[0], group), *out[1:]
        return _apply_to_row(ReduceScatter, out, group)

    block.forward = forward_whole_row


def _apply_to_row(function: type[AllGather] | type[ReduceScatter], x: Tensor, group: Group) -> Tensor:
    """``x``: [1, P, H]."""
    return function.apply(x[0], group)[None]


def check_cuts(model: PreTrainedModel, layers: list[nn.Module], config: ModelConfig, name: str) -> None:
    """Raises ValueError, naming the key of ``models.<name>``, for an architecture that cannot be cut as configured.
    ``model`` may be on the meta device; ``layers`` are its decoder layers."""
    if config.tensor_parallel == config.context_parallel == config.expert_parallel == 1:
        return
    for key, reason in _find_problems(model, layers, config):
        raise ValueError(f"models.{name}.{key} is {getattr(config, key)}: {reason}")


def _find_problems(model: PreTrainedModel, layers: list[nn.Module], config: ModelConfig) -> Iterator[tuple[str, str]]:
    text = model.config.get_text_config()
    queries = text.num_attention_heads
    values = getattr(text, "num_key_value_heads", None) or queries
    ways, turns = config.tensor_parallel, config.context_parallel
    if ways > 1:
        if reason := find_unfit_layers(model, layers):
            yield "tensor_parallel", reason
        if values % ways:
            yield "tensor_parallel", f"it does not divide the {values} heads of keys and values"
        if config.lora is not None and config.lora.dora:
            yield "tensor_parallel", "DoRA (lora.dora) needs the norms of whole rows of the weights"
        if config.optimizer.name == "muon" and not config.frozen:
            yield "tensor_parallel", "Muon (optimizer.name) orthogonalises matrices, not parts of them"
        if config.fp8:
            yield "tensor_parallel", "8-bit products (fp8) scale weights by their largest entry, and a rank has a part"
    if adapts_experts(model):
        for key in ("tensor_parallel", "expert_parallel"):
            if getattr(config, key) > 1:
                yield key, "adapters of stacked experts (lora.target) are computed from whole stacks"
    if turns > 1:
        own = values // ways
        if queries // ways % turns:
            yield "context_parallel", f"it does not divide the {queries // ways} heads of queries of a process"
        if own % turns and turns % own:
            yield "context_parallel", f"the {own} heads of keys and values of a process do not divide over it"
    if config.compile and (ways > 1 or config.expert_parallel > 1):
        yield "compile", "layers that exchange tokens inside (tensor_parallel, expert_parallel) are not compiled"
    if config.expert_parallel > 1 and (reason := find_unfit_experts(model, config.expert_parallel)):
        yield "expert_parallel", reason


def cut_model(model: PackedModel, ranks: RankMeshes) -> None:
    """Distribute the experts of a model without weights, and cut its layers."""
    if ranks.experts is not ranks.whole:
        apply_expert_parallel(model.model, ranks.experts["expert"])
    if ranks.layers is not ranks.whole:
        apply_tensor_parallel(model.model, decoder_layers(model.model), ranks.layers["tensor"])


def shard_model(model: PackedModel, ranks: RankMeshes, compute_dtype: torch.dtype | None, *, host: bool) -> None:
    """Apply FSDP2 to every decoder layer, separately to its distributed experts, and to the rest. Gradients are summed
    over ranks, not averaged: the loss has global denominators. ``host``: shards stay in the host's memory."""
    offload = CPUOffloadPolicy(pin_memory=is_accelerator(ranks.whole.device_type)) if host else OffloadPolicy()
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    experts = find_experts(model.model) if ranks.experts is not ranks.whole else []
    groups = [(experts, ranks.experts), (decoder_layers(model.model), ranks.layers)]
    groups += [(tower_layers(model.model), ranks.whole), ([model], ranks.whole)]
    for module, mesh in ((module, mesh) for modules, mesh in groups for module in modules):
        sharded = fully_shard(module, mesh=ranks.sharding(mesh), mp_policy=precision, offload_policy=offload)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def move_buffers(device: torch.device, module: nn.Module) -> None:
    """Move buffers to where their module computes: they are not sharded."""
    for name, buffer in module.named_buffers(recurse=False):
        module._buffers[name] = buffer.to(device)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers of the language model."""
    inside = {*find_body(model).modules()}
    return [layer for layer in _find_layers(model) if layer in inside]


def tower_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers of a model that sees that are none of its language model. No rank computes a part of them."""
    inside = {*find_body(model).modules()}
    return [layer for layer in _find_layers(model) if layer not in inside]


def _find_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The modules of the classes in `_no_split_modules`. (Sharding replaces their class by a subclass.)"""
    blocks = set(model._no_split_modules or ())
    return [m for m in model.modules() if blocks & {kind.__name__ for kind in type(m).__mro__}]
