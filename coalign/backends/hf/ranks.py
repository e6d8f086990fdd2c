"""The device meshes of one model: which ranks have which rows, parts of a row, parts of a layer, and experts.

Neighbouring ranks communicate fastest, so they are numbered along the parts of a layer first (tensor), then the parts
of a row (context), the parts of a batch (data), and the copies of the sharded model (replicate).
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from coalign.config.schema import ModelConfig

# A weight that is cut in two ways is gathered in two steps; torch warns so for each kind of tensor.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


class RankMeshes:
    """The meshes of a model over all ranks of the default process group. Making one is a collective.

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
