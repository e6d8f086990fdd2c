"""Predicts the speed of one engine replica: a decode step, a prefill, and how many tokens of cache it has room for.

A decode step reads the weights and the keys and values of all running sequences, and computes one token of each: the
longer of both counts most. Reductions between devices, launches for each layer and the host's work for each sequence
come on top.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from coalign_plan.constants import Constants
from coalign_plan.gpus import ClusterSpec
from coalign_plan.job import ModelWork
from coalign_plan.model_size import LayerSize
from coalign_plan.network import ClusterNetwork
from coalign_plan.training import BF16, fill_tiles

GIB = 2**30
PREFILL_TOKENS = 8192  # that an engine computes at once
ACTIVATION_SHARE = 0.03  # share of a device's memory that a sampler needs beside weights and cache


@dataclass(frozen=True)
class EngineReplica:
    """Prices the work of one replica of an engine.

    With expert parallelism, attention is data-parallel in the replica: each device has the attention weights whole and
    its share of the sequences, and the experts are divided (as vLLM and TensorRT-LLM do).
    """

    work: ModelWork
    cluster: ClusterSpec
    constants: Constants

    @property
    def devices(self) -> int:
        return self.work.layout.replica_gpus

    @cached_property
    def _attends_in_parallel(self) -> bool:
        return self.work.layout.expert > 1

    @cached_property
    def _network(self) -> ClusterNetwork:
        return ClusterNetwork(self.cluster, self.constants)

    @cached_property
    def weight_bytes(self) -> float:
        """Bytes of weights on each device of the replica."""
        layout, size = self.work.layout, self.work.size
        dense = sum(layer.count * layer.dense for layer in size.layers)
        experts = size.expert_parameters / layout.tensor
        ends = size.embedding + (0 if size.is_tied else size.head)
        weights = dense + ends if self._attends_in_parallel else dense / layout.tensor + ends / layout.tensor
        return (weights + experts) / layout.pipeline * self.work.weight_bytes

    @property
    def cache_bytes(self) -> float:
        """Bytes for keys and values in the whole replica. Raises ValueError if the weights leave no room."""
        return self._free_bytes

    @cached_property
    def _free_bytes(self) -> float:
        gpu = self.cluster.gpu
        free = gpu.memory_gib * GIB * (self.work.memory_share - ACTIVATION_SHARE) - self.weight_bytes
        if free <= 0:
            raise ValueError(
                f"model {self.work.name}: its weights take {self.weight_bytes / GIB:.0f} GiB of each device, and "
                f"{gpu.name} has {gpu.memory_gib:g}; more tensor or pipeline parallelism divides them"
            )
        return free * self.work.layout.replica_gpus

    @cached_property
    def cache_copies(self) -> float:
        """How many devices of a replica keep the same keys and values: tensor parallelism beyond their heads."""
        if self._attends_in_parallel:
            return 1.0
        heads = max((layer.cache_heads for layer in self.work.size.layers if layer.cache), default=1)
        return max(1.0, self.work.layout.tensor / heads)

    def sequence_bytes(self, context: float) -> float:
        """Bytes that the replica keeps for a sequence of ``context`` tokens."""
        return self.work.size.kv_bytes(context, self.work.kv_bytes) * self.cache_copies

    def decode_seconds(self, sequences: float, context: float) -> float:
        """Return the seconds of one decode step of ``sequences`` whose mean context is ``context`` tokens."""
        layout, size, constants = self.work.layout, self.work.size, self.constants
        batch = sequences / layout.pipeline  # the stages work on parts of the batch
        bandwidth = self.cluster.gpu.memory_gb_s * 1e9 * constants.memory
        read = self._weights_read(batch) + batch * self.sequence_bytes(context) / layout.tensor
        flops = batch * (self._matmul_flops(batch) + self._score_flops * context) / layout.tensor
        seconds = math.hypot(read / bandwidth, flops / self._rate)
        seconds += self._collective_seconds(batch)
        seconds += self._kernels * (constants.eager_layer if self.work.is_eager else constants.layer)
        if self.work.gathers_weights:
            devices = layout.gpus
            seconds += self._network.gather(size.parameters * self.work.weight_bytes, devices)
        return seconds + constants.decode_step * layout.pipeline + constants.sequence * sequences

    def prefill_seconds(self, tokens: float, length: float) -> float:
        """Return the seconds of computing ``tokens`` of prompts of ``length`` tokens each."""
        if tokens <= 0:
            return 0.0
        layout, size = self.work.layout, self.work.size
        head = 2.0 * size.head * layout.pipeline  # for the last token of a prompt only
        matmul = tokens * (self._matmul_flops(min(tokens, PREFILL_TOKENS)) - head) / self._rate
        rate = self.cluster.gpu.flops("fp32" if self.work.precision == "fp32" else "bf16") * self.constants.attention
        attention = tokens * size.attention_flops(length) / rate
        numbers = sum(layer.count * layer.matrix_numbers for layer in size.layers)
        traffic = tokens * numbers * BF16 / (self.cluster.gpu.memory_gb_s * 1e9 * self.constants.memory)
        devices = layout.tensor * layout.pipeline
        return (matmul + attention + traffic) / devices + self._collective_seconds(tokens) / layout.pipeline

    # ---- parts -----------------------------------------------------------------------------------------------------

    @cached_property
    def _kernels(self) -> float:
        """Layers, those with routed experts counted for their further kernels."""
        return sum(
            layer.count * (self.constants.expert_launches if layer.experts else 1) for layer in self.work.size.layers
        )

    @cached_property
    def _rate(self) -> float:
        gpu, precision = self.cluster.gpu, self.work.precision
        return gpu.flops(precision) * gpu.matmul_share * self.constants.matmul

    def _matmul_flops(self, tokens: float) -> float:
        """FLOPs per token of products with weights, and as much more as experts waste that have few tokens each.

        The last stage of a pipeline has the head beside its layers, and the others wait for it.
        """
        size, tile = self.work.size, self.constants.tile
        flops = 2.0 * size.head * self.work.layout.pipeline
        for layer in size.layers:
            flops += 2.0 * layer.count * layer.dense
            if layer.experts:
                expert_tokens, width = tokens * layer.active_experts / layer.experts, layer.expert / (3 * size.hidden)
                share = fill_tiles(expert_tokens, size.hidden, width, tile=tile)
                flops += 2.0 * layer.count * layer.active_experts * layer.expert / share
        return flops

    @cached_property
    def _score_flops(self) -> float:
        """FLOPs per token of context, in terms of the rate of matrix products."""
        scores = sum(layer.count * layer.decode_score_width for layer in self.work.size.layers if not layer.window)
        return 2.0 * scores

    def _weights_read(self, batch: float) -> float:
        """Bytes of weights that a device reads for a step; of experts, those that some token asks for."""
        size, layout = self.work.size, self.work.layout
        idle = sum(layer.count * self._idle_experts(layer, batch) * layer.expert for layer in size.layers)
        idle_bytes = idle * self.work.weight_bytes / layout.tensor
        embedding = size.embedding * self.work.weight_bytes / (1 if self._attends_in_parallel else layout.tensor)
        read = self.weight_bytes * layout.pipeline - idle_bytes
        return read - (0.0 if size.is_tied else embedding)

    @staticmethod
    def _idle_experts(layer: LayerSize, batch: float) -> float:
        if not layer.experts:
            return 0.0
        return layer.experts * (1 - layer.active_experts / layer.experts) ** max(1.0, batch)

    def _collective_seconds(self, tokens: float) -> float:
        """Seconds of the reductions between the devices of a replica over all layers.

        Where attention is data-parallel, experts gather the tokens of all devices and scatter their sums: as much as
        one reduction in each layer with experts. Stages of a pipeline pass activations on.
        """
        layout, size = self.work.layout, self.work.size
        activations = tokens * size.hidden * BF16
        reductions = 2 * size.layer_count
        if self._attends_in_parallel:
            reductions = sum(layer.count for layer in size.layers if layer.experts)
        seconds = reductions * self._network.reduce(activations, layout.tensor) if layout.tensor > 1 else 0.0
        return seconds + (layout.pipeline - 1) * activations / self._network.rate(layout.gpus)
