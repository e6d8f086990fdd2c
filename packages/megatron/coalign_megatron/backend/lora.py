"""Low-rank adapters (2106.09685) in Megatron's linear layers; the weights beneath them are frozen.

Adapters are those that peft puts into the Hugging Face model: A [rank, in] and B [out, rank] of each of its linear
layers, and of each expert of a stack. Every tensor-parallel rank has them whole, in float32, and computes with its
columns of A or its rows of B. So files and checkpoints do not depend on how the model is cut.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import tensor_parallel
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from transformers import PreTrainedModel

from coalign.backends import lora, pretrained
from coalign.config.schema import ModelConfig
from coalign.hub import find_directory
from coalign.roles import Context
from coalign_megatron.backend.partition import SCORE, AdaptedShard, WeightPartition, collect_tensors


class LowRankAdapter(nn.Module):
    """Computes what adapters add to the output of ``layer``, a column- or row-parallel one.

    Megatron fuses layers that have an adapter each (queries, keys and values): ``lora_A`` and ``lora_B`` have one entry
    for each of them, copies of ``factors``, and so has ``scaling``. Between tensor-parallel ranks only A x travels,
    which has as many columns as their ranks add up to.
    """

    def __init__(
        self, layer: Any, shard: AdaptedShard, factors: Sequence[tuple[Tensor, Tensor]], scaling: Sequence[float]
    ) -> None:
        super().__init__()
        weight = layer.weight
        copies = [[nn.Parameter(f.to(weight.device, torch.float32, copy=True)) for f in pair] for pair in factors]
        self.lora_A, self.lora_B = (nn.ParameterList(column) for column in zip(*copies, strict=True))
        self.shard, self.scaling, self.enabled = shard, scaling, True
        self.rows = nn.Buffer(torch.tensor(shard.rows, device=weight.device), persistent=False)
        self.group: dist.ProcessGroup = layer.tp_group
        self.gathered = self.group.size() == 1 or layer.explicit_expert_comm  # tokens come to experts already gathered
        self.sequence_parallel: bool = layer.sequence_parallel
        for parameter in self.parameters():
            setattr(parameter, "allreduce", weight.allreduce)  # noqa: B010  (over which ranks gradients are summed)
            # The norm of all gradients counts this parameter on one rank alone.
            setattr(parameter, "tensor_model_parallel", True)  # noqa: B010
            setattr(parameter, "shared", self.group.rank() > 0)  # noqa: B010
        layer.lora = self
        layer.register_forward_hook(_add)

    def enable_adapters(self, enabled: bool) -> None:
        self.enabled = enabled

    def compute_factors(self) -> tuple[Tensor, Tensor]:
        """Return A and scaling · B of this rank's shard of the weight: [ranks, columns] and [rows, ranks]."""
        a = torch.cat([factor[:, slice(*self.shard.columns)] for factor in self.lora_A])
        scaled = [b * scale for b, scale in zip(self.lora_B, self.scaling, strict=True)]
        b = F.pad(torch.block_diag(*scaled), (0, 0, 0, 1))  # rows without an adapter take the last one, of zeros
        return a, b.index_select(0, self.rows)

    def forward(self, x: Tensor) -> Tensor:
        """Return what is added to the layer's output for the input ``x``; both are sharded as the layer shards them."""
        a, b = (factor.to(x.dtype) for factor in self.compute_factors())
        low = F.linear(x, a)
        return F.linear(low if self.gathered else self._exchange(low), b)

    def _exchange(self, low: Tensor) -> Tensor:
        """Sum A x of a row-parallel layer over the ranks; give that of a column-parallel one to all of them."""
        if self.shard.row and self.sequence_parallel:
            return tensor_parallel.reduce_scatter_to_sequence_parallel_region(low, group=self.group)
        if self.shard.row:
            return tensor_parallel.reduce_from_tensor_model_parallel_region(low, group=self.group)
        if self.sequence_parallel:
            return tensor_parallel.gather_from_sequence_parallel_region(low, group=self.group)
        return tensor_parallel.copy_to_tensor_model_parallel_region(low, group=self.group)

    def list_partial(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of which each tensor-parallel rank computes a partial gradient."""
        # Without sequence parallelism all ranks compute the same of what is not cut: A of columns, B of rows.
        every = self.gathered or self.sequence_parallel
        yield from self.lora_A if every or self.shard.row else ()
        yield from self.lora_B if every or not self.shard.row else ()

    @torch.no_grad()
    def merge(self, weight: Tensor) -> Tensor:
        """Return weight + scaling · B A as a new tensor of this rank's shard, in its dtype."""
        a, b = self.compute_factors()
        return weight.float().addmm(b, a).to(weight.dtype)


def _add(layer: Any, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    out, bias = outputs
    return (out + layer.lora(inputs[0]) if layer.lora.enabled else out), bias


def attach(
    chunks: Sequence[nn.Module], weights: WeightPartition, carrier: PreTrainedModel, rank: int, *, frozen: bool
) -> list[str]:
    """Put the adapters of ``carrier`` into the chunks of ``rank``; return the names of all weights that have one."""
    layers = find_layers(carrier)
    for shard in weights.adapted_shards(rank, layers):
        number, _, name = shard.layer.partition("/")
        owners = [layers[source] for source in shard.sources]
        factors = [_get_factors(owner, shard.expert) for owner in owners]
        layer, scaling = chunks[int(number)].get_submodule(name), [owner.scaling[lora.ADAPTER] for owner in owners]
        LowRankAdapter(layer, shard, factors, scaling).requires_grad_(not frozen)
    return sorted(layers)


def build_carrier(config: ModelConfig, context: Context) -> PreTrainedModel:
    """Build the Hugging Face model with its adapters, whole and on the host, over weights without memory.

    Adapters are drawn as every backend draws them, or those of ``config.lora.load``. Raises ValueError, naming the key,
    for adapters that do not fit.
    """
    model = pretrained.build_skeleton(config.model_copy(update={"lora": None}), name=context.model, packed=False)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            stand_in = torch.empty(1, dtype=parameter.dtype).expand(parameter.shape)
            module.register_parameter(name, nn.Parameter(stand_in, requires_grad=False))
    lora.attach(model, config, seed=context.seed, name=context.model)
    lora.check_separate(model, context)
    for parameter in lora.find_trained_parameters(model).values():
        parameter.data = parameter.data.contiguous()
    if config.lora and config.lora.load:
        lora.load(model, find_directory(config.lora.load), context.model)
    return model.requires_grad_(False)


def find_layers(model: nn.Module) -> dict[str, Any]:
    """Return peft's layers by the names of the weights that they adapt, as a model without adapters has them."""
    return {name.replace(lora.BASE, ""): layer for name, layer in lora.find_adapted_weights(model).items()}


def _get_factors(layer: Any, expert: int | None) -> tuple[Tensor, Tensor]:
    """Return A and B of a layer, or of one expert of a stack (coalign.backends.lora._merge): views."""
    a, b = (factor[lora.ADAPTER].weight for factor in (layer.lora_A, layer.lora_B))
    if expert is None:
        return a, b
    return a.unflatten(0, (layer.num_experts, -1))[expert], b.unflatten(1, (-1, layer.num_experts))[:, :, expert]


def find_head(chunks: Sequence[nn.Module]) -> Tensor | None:
    """Return the output layer, if it is on this rank."""
    return collect_tensors(chunks[-1:]).get("0/output_layer.weight")


def find_adapters(chunks: Sequence[nn.Module]) -> dict[str, LowRankAdapter]:
    """Return the adapters by the names of their layers, `<chunk>/<name in the chunk>`."""
    return {
        f"{number}/{name.removesuffix('.lora')}": cast(LowRankAdapter, module)
        for number, chunk in enumerate(chunks)
        for name, module in chunk.named_modules()
        if name.endswith(".lora")
    }


def sum_partial_gradients(chunks: Sequence[nn.Module]) -> None:
    """Sum the partial gradients of tensor-parallel ranks (a collective)."""
    groups: dict[dist.ProcessGroup, list[Tensor]] = defaultdict(list)
    for adapter in find_adapters(chunks).values():
        if adapter.group.size() > 1:
            groups[adapter.group] += [cast(Any, parameter).main_grad for parameter in adapter.list_partial()]
    for group, gradients in groups.items():
        flat = _flatten_dense_tensors(gradients)
        dist.all_reduce(flat, group=group)
        for gradient, total in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
            gradient.copy_(total)


class MergedTensors(Mapping[str, Tensor]):
    """A rank's ``tensors``, merged with their adapters when they are asked for; the last merged one is kept."""

    def __init__(self, tensors: Mapping[str, Tensor], chunks: Sequence[nn.Module]) -> None:
        self.tensors, self.adapters = tensors, find_adapters(chunks)
        self._merge = lru_cache(maxsize=1)(lambda name: self.adapters[name].merge(self.tensors[f"{name}.weight"]))

    def __getitem__(self, name: str) -> Tensor:
        layer = name.removesuffix(".weight")
        return self._merge(layer) if layer in self.adapters else self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def list_owned(chunks: Sequence[nn.Module], weights: WeightPartition, rank: int) -> Iterator[LowRankAdapter]:
    """Yield the adapters that this rank is the first to have: each adapter is owned by one rank."""
    mesh, at = weights.layout.mesh, weights.layout.mesh.at(rank)
    stage = [peer for peer in range(mesh.size) if mesh.at(peer).pipeline == at.pipeline]
    first = next(peer for peer in stage if mesh.at(peer).expert == at.expert)
    for adapter in find_adapters(chunks).values():
        if rank == (stage[0] if adapter.shard.expert is None else first):
            yield adapter


def export_separate(chunks: Sequence[nn.Module], weights: WeightPartition, rank: int) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's own adapters by their names in an adapter's file, B multiplied by the scaling."""
    for adapter in list_owned(chunks, weights, rank):
        factors = zip(adapter.shard.sources, adapter.lora_A, adapter.lora_B, adapter.scaling, strict=True)
        for source, a, b, scale in factors:
            layer = f"{lora.PREFIX}{source.removesuffix('.weight')}{lora.INFIX}"
            yield f"{layer}A.weight", a.detach()
            yield f"{layer}B.weight", b.detach() * scale


def save(
    chunks: Sequence[nn.Module], weights: WeightPartition, config: ModelConfig, context: Context, directory: str | Path
) -> None:
    """Write the adapters in peft's format (a collective)."""
    local: dict[Any, Any] = {}
    for adapter in list_owned(chunks, weights, context.rank):
        pairs = zip(adapter.shard.sources, adapter.lora_A, adapter.lora_B, strict=True)
        local |= {(source, adapter.shard.expert): (a.detach().cpu(), b.detach().cpu()) for source, a, b in pairs}
    if config.head != "lm" and (head := find_head(chunks)) is not None:
        local[SCORE] = head.detach().cpu()
    shares: list[Any] = [None] * context.world_size
    dist.gather_object(local, shares if context.rank == 0 else None)
    if context.rank == 0:
        carrier = build_carrier(config, context)
        layers = find_layers(carrier)
        for key, value in (item for share in shares for item in share.items()):
            if key == SCORE:
                carrier.get_parameter(SCORE).copy_(value)
                continue
            for there, here in zip(_get_factors(layers[key[0]], key[1]), value, strict=True):
                there.copy_(here)
        lora.write(carrier, directory, lora.collect(carrier, lambda tensor: tensor))
        pretrained.save_tokenizer(config, context, directory)
    dist.barrier()
