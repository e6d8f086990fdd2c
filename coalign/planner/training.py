"""Predicts the time of training and of scoring passes of one model.

A device's time is that of its matrix products, its attention and its memory traffic, and what collectives add that
computation does not hide; micro-batches repeat it, a pipeline stretches it by its bubble, and the optimizer follows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from coalign.planner.constants import Constants
from coalign.planner.gpus import ClusterSpec
from coalign.planner.job import ModelWork
from coalign.planner.model_size import LayerSize
from coalign.planner.network import ClusterNetwork

BF16 = 2.0  # bytes
NARROW = ("fp8", "fp4")
ADAM_BYTES = 30.0  # moved for a parameter by one AdamW step in mixed precision: 16 read, 14 written


@dataclass(frozen=True)
class TokenBatch:
    """Tokens of one pass over all devices: how many, in sequences of which lengths, and how many need logits.

    ``length`` is the mean length that a token finds itself in (sum of squares over sum), ``longest`` the longest one.
    """

    tokens: float
    length: float
    longest: float
    head_share: float = 1.0

    @classmethod
    def from_lengths(cls, lengths: Sequence[float], count: float, head_share: float = 1.0) -> TokenBatch:
        """Describe ``count`` sequences whose lengths are distributed as ``lengths``."""
        total = sum(lengths)
        squares = sum(length * length for length in lengths)
        return cls(count * total / len(lengths), squares / total, max(lengths), head_share)

    def part(self, parts: int) -> TokenBatch:
        """Return one of ``parts`` equal parts."""
        return replace(self, tokens=self.tokens / parts)


@dataclass(frozen=True)
class PassTime:
    """Seconds of a pass, by what they go to; ``flops`` are the model's, over all devices, without recomputation."""

    matmul: float = 0.0
    attention: float = 0.0
    traffic: float = 0.0
    launches: float = 0.0
    collectives: float = 0.0
    bubble: float = 0.0
    waiting: float = 0.0  # for the rank with the most to do
    optimizer: float = 0.0
    transfer: float = 0.0  # between device and host
    flops: float = 0.0

    @property
    def seconds(self) -> float:
        busy = self.matmul + self.attention + self.traffic + self.launches
        return busy + self.collectives + self.bubble + self.waiting + self.optimizer + self.transfer

    def times(self, count: float) -> PassTime:
        """Return the time of ``count`` such passes."""
        return PassTime(*(count * value for value in vars(self).values()))

    def __add__(self, other: PassTime) -> PassTime:
        return PassTime(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class TrainingModel:
    """Prices passes of one model on a cluster."""

    work: ModelWork
    cluster: ClusterSpec
    constants: Constants

    def forward(self, batch: TokenBatch) -> PassTime:
        """Return the time of one forward pass over the batch (a scorer's, or log-probs before training)."""
        return self._pass(batch, trains=False)

    def train(self, batch: TokenBatch, mini_batches: int = 1) -> PassTime:
        """Return the time of training on the batch in ``mini_batches`` optimizer steps."""
        part = batch.part(mini_batches)
        return (self._pass(part, trains=True) + self._optimizer()).times(mini_batches)

    # ---- parts -----------------------------------------------------------------------------------------------------

    @property
    def network(self) -> ClusterNetwork:
        return ClusterNetwork(self.cluster, self.constants)

    def _pass(self, batch: TokenBatch, *, trains: bool) -> PassTime:
        layout, size = self.work.layout, self.work.size
        own = batch.tokens / layout.data  # of the devices that hold one copy together
        shared = layout.context * layout.tensor
        micro_batches = max(1, math.ceil(own / (self.work.micro_batch_tokens * layout.context) - 1e-9))
        tokens = (
            own / micro_batches / layout.context
        )  # of one device's micro-batch; split further by tensor parallelism
        passes = _Passes.of(self.work, trains)
        matmul = self._matmul(tokens, batch, passes)
        attention = self._attention(tokens, batch, passes) / layout.tensor
        traffic = self._traffic(tokens, passes) / layout.tensor
        stage_layers = math.ceil((size.layer_count + 2) / layout.pipeline) / (size.layer_count + 2)  # ends count as one
        busy = (matmul + attention + traffic) * stage_layers
        launched = self.constants.eager_layer * passes.launches * size.layer_count * stage_layers
        launches = math.hypot(busy, launched) - busy
        collectives = self._collectives(tokens, passes, (busy + launches)) * stage_layers
        collectives += self._sharded_weights(passes, busy + launches + collectives)
        step = busy + launches + collectives
        bubble = step * (layout.pipeline - 1) / layout.virtual_pipeline
        transfer = self._activation_transfer(tokens, busy) if trains else 0.0
        waiting = step * max(0.0, batch.longest / own - 1) if own < batch.longest else 0.0
        flops = size.forward_flops(batch.length, batch.head_share) * batch.tokens * (3 if trains else 1)
        del shared
        return PassTime(
            matmul=matmul * stage_layers * micro_batches,
            attention=attention * stage_layers * micro_batches,
            traffic=traffic * stage_layers * micro_batches,
            launches=launches * micro_batches,
            collectives=collectives * micro_batches,
            bubble=bubble,
            waiting=waiting * micro_batches,
            transfer=transfer * micro_batches,
            flops=flops,
        )

    def _rate(self, precision: str) -> float:
        gpu = self.cluster.gpu
        share = self.constants.matmul * gpu.matmul_share
        return gpu.flops(precision) * share * (self.constants.narrow_matmul if precision in NARROW else 1.0)

    @property
    def _bandwidth(self) -> float:
        return self.cluster.gpu.memory_gb_s * 1e9 * self.constants.memory

    def _matmul(self, tokens: float, batch: TokenBatch, passes: _Passes) -> float:
        """Seconds of a micro-batch's products with all weights of a copy."""
        layout, size = self.work.layout, self.work.size
        rate = self._rate(self.work.precision)
        seconds = 0.0
        for layer in size.layers:
            dense = self._product(tokens * layer.dense, layer.dense, rate, layout.tensor)
            seconds += layer.count * dense
            if layer.experts:
                seconds += layer.count * self._expert_product(tokens, layer, rate)
        seconds *= passes.matmul
        outputs = self.work.head_outputs
        head = size.head if outputs is None else outputs * size.hidden
        seconds += (
            self._product(tokens * batch.head_share * head, head, self._rate("bf16"), layout.tensor) * passes.head
        )
        return seconds

    def _product(self, weight_tokens: float, weights: float, rate: float, parts: int) -> float:
        """Seconds of a product of tokens and weights: computing, or reading the weights where tokens are few."""
        return math.hypot(2 * weight_tokens / rate, weights * BF16 / self._bandwidth) / parts

    def _expert_product(self, tokens: float, layer: LayerSize, rate: float) -> float:
        """Seconds of one layer's routed experts; few tokens for each leave their tiles partly empty."""
        parallel = max(1, self.work.layout.expert)
        assigned = tokens * layer.active_experts  # to the experts of this device: as many as its own tokens ask for
        local = layer.experts / parallel
        each = assigned / local
        share = each / (each + self.constants.expert_tokens)
        tensor = self.work.layout.tensor if parallel == 1 else 1
        computing = (
            2 * assigned * layer.expert / (rate * share) / (tensor if parallel == 1 else self.work.layout.tensor)
        )
        return math.hypot(computing, local * layer.expert * BF16 / self._bandwidth / tensor)

    def _attention(self, tokens: float, batch: TokenBatch, passes: _Passes) -> float:
        rate = self.cluster.gpu.bf16_tflops * 1e12 * self.constants.attention
        if self.work.attention_tflops:
            rate = min(rate, self.work.attention_tflops * 1e12)
        return tokens * self.work.size.attention_flops(batch.length) * passes.attention / rate

    def _traffic(self, tokens: float, passes: _Passes) -> float:
        numbers = sum(layer.count * layer.matrix_numbers for layer in self.work.size.layers)
        return tokens * numbers * BF16 * self.constants.traffic * passes.traffic / self._bandwidth

    def _collectives(self, tokens: float, passes: _Passes, busy: float) -> float:
        """Seconds of a micro-batch's collectives of tensor, context and expert parallelism over all layers."""
        layout, size, network = self.work.layout, self.work.size, self.network
        seconds = 0.0
        activations = tokens * size.hidden * BF16
        if layout.tensor > 1:  # two reductions a layer and direction (2205.05198 as gather and scatter)
            seconds += 2 * size.layer_count * passes.exchanges * network.reduce(activations, layout.tensor)
        if layout.context > 1:  # keys and values of the others, hidden where attention takes longer
            cached = tokens * layout.context * sum(layer.count * layer.cache for layer in size.layers) * BF16
            gathered = network.gather(cached / layout.tensor, layout.context, layout.tensor)
            seconds += passes.exchanges * gathered * (1 - self.constants.overlap)
        if layout.expert > 1:
            routed = sum(layer.count for layer in size.layers if layer.experts)
            copies = max(layer.active_experts for layer in size.layers)
            sent = network.exchange(tokens / layout.tensor, copies, size.hidden * BF16, layout.expert)
            seconds += 2 * routed * passes.exchanges * sent
        return seconds

    def _sharded_weights(self, passes: _Passes, busy: float) -> float:
        """Seconds of gathering sharded weights and scattering gradients in one micro-batch that nothing hides."""
        layout, network = self.work.layout, self.network
        if layout.sharding != "weights" or layout.data == 1:
            return 0.0
        group = layout.shard_group or layout.data * layout.context
        stride = layout.tensor
        frozen = bool(self.work.lora_rank)
        weights = self.work.size.parameters / layout.tensor / layout.pipeline * BF16
        seconds = passes.gathers * network.gather(weights, group, stride)
        if passes.trains and not frozen:
            seconds += network.gather(weights * 2, group, stride)  # gradients in float32
        if passes.trains and layout.shard_group:
            seconds += network.reduce(weights * 2 / group, layout.data // group, stride * group)
        layers = self.work.size.layer_count / layout.pipeline
        seconds += (layers - 1) * passes.gathers * network.latency(group, stride)
        return _exposed(seconds, busy, self.constants.overlap)

    def _activation_transfer(self, tokens: float, busy: float) -> float:
        """Seconds of moving each layer's input to the host and back that nothing hides."""
        if not self.work.offload_activations:
            return 0.0
        moved = 2 * tokens * self.work.size.hidden * BF16 * self.work.size.layer_count / self.work.layout.pipeline
        return _exposed(moved / (self.constants.host_gb_s * 1e9), busy, 0.9)

    def _optimizer(self) -> PassTime:
        """Seconds of one optimizer step with the collectives that come once a step."""
        work, layout, network = self.work, self.work.layout, self.network
        if work.lora_rank:
            trained = float(work.size.lora_parameters(work.lora_rank))
        else:
            trained = float(work.size.parameters)
        local = trained / layout.tensor / layout.pipeline
        ranks = layout.data * layout.context
        owned = local / ranks if layout.sharding != "none" else local
        if work.size.is_moe and layout.sharding != "weights":  # experts are already divided by expert parallelism
            expert = work.size.expert_parameters / work.size.parameters
            owned *= 1 - expert + expert  # the same share: expert ranks are data-parallel ranks of the dense part
        seconds = owned * ADAM_BYTES / self._bandwidth
        collectives = 0.0
        if layout.sharding != "weights" and ranks > 1:
            dense = local
            if layout.expert > 1:
                share = work.size.expert_parameters / work.size.parameters
                dense = local * (1 - share) + local * share / layout.expert * layout.tensor
            collectives = network.gather(dense * 4, ranks, layout.tensor) + network.gather(
                dense * BF16, ranks, layout.tensor
            )
            collectives *= 1 - self.constants.overlap
        transfer = 0.0
        if work.offload_optimizer:
            transfer = owned * 6 / (self.constants.host_gb_s * 1e9)  # gradients there, weights back
            seconds = owned * ADAM_BYTES / (self.constants.host_adam_gb_s * 1e9)
        if work.offload_weights:
            transfer += work.size.parameters / layout.gpus * BF16 / (self.constants.host_gb_s * 1e9)
        return PassTime(optimizer=seconds, collectives=collectives, transfer=transfer)


@dataclass(frozen=True)
class _Passes:
    """How often a forward pass's work is done: once; for training also backward, and again if recomputed."""

    trains: bool
    matmul: float
    attention: float
    head: float
    traffic: float
    launches: float
    exchanges: float
    gathers: float

    @classmethod
    def of(cls, work: ModelWork, trains: bool) -> _Passes:
        if not trains:
            return cls(False, 1, 1, 1, 1, 1, 1, 1)
        again = 1.0 if work.recompute == "full" else 0.0
        scores = 1.0 if work.recompute != "none" else 0.0
        weights = 0.0 if work.lora_rank else 1.0  # gradients of frozen weights are not computed
        return cls(
            True,
            matmul=2 + again + weights,
            attention=3.5 + scores,  # flash attention computes its scores again in backward (2307.08691)
            head=2 + weights,
            traffic=3 + again,
            launches=2.5 + again,
            exchanges=2 + again,
            gathers=2,
        )


def _exposed(collective: float, busy: float, overlap: float) -> float:
    """Return what a collective adds to computation that can hide the share ``overlap`` of it, and no more than itself."""
    hidden = min(overlap * collective, busy)
    return collective - hidden
