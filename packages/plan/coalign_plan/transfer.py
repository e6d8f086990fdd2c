"""Predicts what moves between models and memories: weight syncs, and states that leave the devices and come back."""

from __future__ import annotations

from coalign_plan.constants import Constants
from coalign_plan.gpus import ClusterSpec
from coalign_plan.job import ModelWork
from coalign_plan.model_size import ModelSize
from coalign_plan.training import BF16

MATRICES = 9  # tensors of a layer beside its experts: projections, norms


def count_tensors(size: ModelSize) -> int:
    """Return how many tensors a checkpoint of the model has, in Hugging Face's layout: each expert apart."""
    return sum(layer.count * (MATRICES + 3 * layer.experts) for layer in size.layers) + 3


def predict_sync(
    trainer: ModelWork, engine: ModelWork, cluster: ClusterSpec, constants: Constants, *, by_tensor: bool = False
) -> float:
    """Return the seconds of bringing a trainer's weights into an engine, on its own devices or on others.

    The trainer's ranks hold parts of every tensor, and engines need other parts. So every device sees all weights pass
    by, at the rate of its link or of its network card. ``by_tensor``: each tensor is a message of its own, rather than
    a part of a large bucket.
    """
    sent = trainer.size.parameters * min(BF16, max(1.0, engine.weight_bytes))
    if trainer.lora_rank:
        sent = trainer.size.lora_parameters(trainer.lora_rank) * BF16
    devices = trainer.layout.gpus + (0 if trainer.group == engine.group else engine.layout.gpus)
    messages = count_tensors(trainer.size) * constants.sync_tensor if by_tensor else 0.0
    passing = broadcast_seconds(sent, devices, cluster, constants) if devices > 1 else 0.0
    return constants.sync_fixed + messages + passing


def broadcast_seconds(sent: float, devices: int, cluster: ClusterSpec, constants: Constants) -> float:
    """Return the seconds of broadcasting ``sent`` bytes to devices, within a node or beyond."""
    if devices <= cluster.domain:
        return sent / (cluster.gpu.link_gb_s * 1e9 * constants.link)
    return sent / (cluster.network_gb_s * 1e9 * constants.network)


def predict_move(work: ModelWork, constants: Constants) -> float:
    """Return the seconds in which a device's share of a model's states goes to host memory, or comes from there."""
    size, layout = work.size, work.layout
    if work.role != "trainer":
        held = size.parameters * work.weight_bytes / layout.replica_gpus
    elif work.lora_rank:
        held = size.parameters * work.weight_bytes / layout.gpus
    else:
        held = size.parameters * (work.weight_bytes + (0 if work.offload_optimizer else 12)) / layout.gpus
    return held / (constants.host_gb_s * 1e9)
