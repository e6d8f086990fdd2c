"""The ranks of one model as meshes: whose rows, which part of a row, which part of a layer, which experts.

Neighbours are closest to each other: ranks count the parts of a layer first (tensor), then the parts of a row
(context), then the shares of a batch (data), and copies of the sharded model (replicate) last.
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from coalign.config.schema import ModelConfig

# Where a weight is cut in two ways, it is gathered in two steps; torch says so for each kind of tensor.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


class RankMeshes:
    """The meshes of a model over all ranks of the default process group. Making one is a collective.

    Each of the ``context`` × ``tensor`` ranks that compute a row together holds a part of it between two layers, and
    other rows are elsewhere. So no two ranks ever see the same token there, and every gradient is a sum over all ranks:
    for weights that nothing cuts, over the ``whole`` of them; for those that are cut by ``tensor`` or ``expert``, over
    the other dimension of ``layers`` or ``experts``. With dp_replicate these meshes have one dimension more, in front.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        """Raises ValueError where the sizes do not divide the ranks."""
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
        # Who computes one row together, and who has the other rows.
        self.rows = mesh(data=world // (context * tensor), context=context, tensor=tensor)

    def sharding(self, mesh: DeviceMesh) -> DeviceMesh:
        """The part of ``mesh`` that FSDP shards over; with copies, over the second of two dimensions."""
        return mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]
