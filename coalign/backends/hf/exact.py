"""Sums gradients in an order that does not depend on the number of ranks (`reduction: exact`).

The driver cuts each update into leaves (coalign.cluster.batch_shards), and rank r of R computes the leaves r, r + R,
r + 2R … one after the other. Each leaf's gradient goes into one binary tree over the numbers of the leaves. Missing
leaves at the end are zeros, which change no sum, so the tree is the same for any number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from coalign.config.schema import ModelConfig


class _TreeSum:
    """Adds tensors in a binary tree over their numbers: (0 + 1) + (2 + 3) …, with log2 of their count in memory."""

    def __init__(self) -> None:
        self._partial: list[tuple[int, Tensor]] = []  # sums of 2 ** height tensors; heights fall

    def add(self, tensor: Tensor) -> None:
        """Add the tensor with the next number. It is copied if it has to be kept."""
        height = 0
        while self._partial and self._partial[-1][0] == height:
            tensor = self._partial.pop()[1].add_(tensor)
            height += 1
        self._partial.append((height, tensor if height else tensor.clone()))

    def take(self) -> Tensor:
        """Return the sum, and begin anew."""
        _, total = self._partial.pop()
        while self._partial:
            total = self._partial.pop()[1].add_(total)
        return total.add_(0.0)  # -0.0 becomes 0.0: how many zeros were added depends on the ranks


class LeafReduction:
    """The sum of the leaves' gradients for all modules that FSDP shards; it takes the place of FSDP's reduce-scatter.
    ``is_last`` says that the gradients under way are those of this rank's last leaf. Only then is there a result;
    before, FSDP adds zeros to the gradient."""

    def __init__(self, model: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule as ShardedModule  # slow

        self.is_last = False
        for module in model.modules():
            if isinstance(module, ShardedModule):
                reduction = _ModuleReduction(self)
                if dist.get_world_size() > 1:
                    module.set_custom_reduce_scatter(reduction)  # pyright: ignore[reportArgumentType] (base is private)
                else:  # FSDP has nothing to scatter
                    module.set_all_reduce_hook(reduction.reduce_alone)


class _ModuleReduction:
    """A reduce-scatter (torch.distributed.fsdp) of one module: an all-to-all of shards, and each rank's own sum."""

    def __init__(self, owner: LeafReduction) -> None:
        self.owner, self.sum = owner, _TreeSum()

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        self._add(received.chunk(group.size()), output_tensor)

    def reduce_alone(self, gradient: Tensor) -> None:
        self._add([gradient], gradient)

    def _add(self, leaves: Any, output: Tensor) -> None:
        for leaf in leaves:
            self.sum.add(leaf)
        if self.owner.is_last:
            output.copy_(self.sum.take())
        else:
            output.zero_()


def check_exact(config: ModelConfig, name: str) -> None:
    """Raises ValueError, naming the key of ``models.<name>``, for what `reduction: exact` cannot be combined with."""
    wanted = {
        "tensor_parallel": (1, "it sums over the ranks that share a layer"),
        "pipeline_parallel": (1, "it needs whole models"),
        "context_parallel": (1, "it sums over the ranks that share a row"),
        "expert_parallel": (1, "it sums over the ranks that share the experts"),
        "dp_replicate": (1, "copies are summed by an all-reduce"),
        "rows": (("auto", "packed", "padded"), "single rows call a layer several times in a leaf"),
        "compile": (False, "compiled kernels depend on the order in which a rank sees lengths"),
        "fp8": (False, "the scales of 8-bit products have not been compared over ranks"),
        "router_aux_loss_coef": (0.0, "that loss joins the leaves of an update"),
    }
    settings = [(key, getattr(config, key), right, why) for key, (right, why) in wanted.items()]
    settings.append(("optimizer.name", config.optimizer.name, "adamw", "others mix entries of a weight"))
    settings.append(("lora.base_bits", config.lora and config.lora.base_bits, None, "4-bit weights are not sharded"))
    for key, value, right, why in [] if config.frozen else settings:
        choice = right if isinstance(right, tuple) else (right,)
        if value not in choice:
            must = " or ".join(map(str, choice))
            raise ValueError(f"models.{name}.{key} is {value}: with `reduction: exact` it must be {must}, since {why}")
