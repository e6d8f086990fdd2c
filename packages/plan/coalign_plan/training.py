"""Predicts the time of training and of scoring passes of one model.

A device's time is that of its matrix products, its attention and its memory traffic, and what collectives add that
computation does not hide; micro-batches repeat it, a pipeline stretches it by its bubble, and the optimizer follows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from coalign_plan.constants import Constants
from coalign_plan.gpus import ClusterSpec
from coalign_plan.job import ModelWork
from coalign_plan.model_size import LayerSize
from coalign_plan.network import ClusterNetwork

BF16 = 2.0  # bytes
NARROW = {"fp8": 1, "fp4": 2}  # how often scaling and casting take their part
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

    def part(self, count: int) -> TokenBatch:
        """Return one of ``count`` equal mini-batches."""
        return replace(self, tokens=self.tokens / count)


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
        mini_batch = batch.part(mini_batches)
        return (self._pass(mini_batch, trains=True) + self._optimizer()).times(mini_batches)

    # ---- parts -----------------------------------------------------------------------------------------------------

    @property
    def network(self) -> ClusterNetwork:
        return ClusterNetwork(self.cluster, self.constants)

    def _pass(self, batch: TokenBatch, *, trains: bool) -> PassTime:
        layout, size = self.work.layout, self.work.size
        copy_tokens = batch.tokens / layout.data  # tokens of the devices that hold one copy together
        micro_batches = max(1, math.ceil(copy_tokens / (self.work.micro_batch_tokens * layout.context) - 1e-9))
        tokens = copy_tokens / micro_batches / layout.context  # computed together with tensor-parallel peers
        passes = _Passes.of(self.work, trains)
        matmul = self._matmul(tokens, batch, passes)
        attention = self._attention(tokens, batch, passes) / layout.tensor
        traffic = self._traffic(tokens, passes) / layout.tensor
        stage_layers = math.ceil((size.layer_count + 2) / layout.pipeline) / (size.layer_count + 2)  # ends count as one
        busy = (matmul + attention + traffic) * stage_layers
        kernels = sum(layer.count * (self.constants.expert_launches if layer.experts else 1) for layer in size.layers)
        launched = self.constants.eager_layer * passes.launches * kernels * stage_layers
        launches = math.hypot(busy, launched) - busy
        collectives = self._collectives(tokens, passes) * stage_layers
        collectives += self._sharded_weights(passes, busy + launches + collectives)
        step = busy + launches + collectives
        bubble = step * (layout.pipeline - 1) / layout.virtual_pipeline
        transfer = self._activation_transfer(tokens, busy) if trains else 0.0
        waiting = step * max(0.0, batch.longest / copy_tokens - 1) if copy_tokens < batch.longest else 0.0
        flops = size.forward_flops(batch.length, batch.head_share) * batch.tokens * (3 if trains else 1)
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
        return gpu.flops(precision) * share * self.constants.narrow_matmul ** NARROW.get(precision, 0)

    @property
    def _width(self) -> float:
        """Bytes of a number that is computed with; around quantised products they are in bf16."""
        return 4.0 if self.work.precision == "fp32" else BF16

    @property
    def _bandwidth(self) -> float:
        return self.cluster.gpu.memory_gb_s * 1e9 * self.constants.memory

    def _matmul(self, tokens: float, batch: TokenBatch, passes: _Passes) -> float:
        """Seconds of a micro-batch's products with all weights of a copy."""
        size = self.work.size
        seconds = 0.0
        for layer in size.layers:
            once = self._product(tokens, layer.dense, size.hidden, size.hidden, self.work.precision)
            if layer.experts:
                once += self._expert_product(tokens, layer)
            seconds += layer.count * once
        outputs = size.vocabulary if self.work.head_outputs is None else self.work.head_outputs
        precision = "bf16" if self.work.precision in NARROW else self.work.precision  # heads are not quantised
        logits = self._product(tokens * batch.head_share, outputs * size.hidden, size.hidden, outputs, precision)
        return seconds * passes.matmul + logits * passes.head

    def _product(self, tokens: float, weights: float, inputs: float, outputs: float, precision: str) -> float:
        """Seconds of products of tokens and ``weights`` numbers in matrices of this shape, on one of the devices that
        share them: computing, or reading the weights where tokens are few."""
        shards = self.work.layout.tensor
        share = fill_tiles(tokens, inputs, outputs / shards, tile=self.constants.tile)
        computing = 2 * tokens * weights / (self._rate(precision) * share)
        return math.hypot(computing, weights * self._width / self._bandwidth) / shards

    def _expert_product(self, tokens: float, layer: LayerSize) -> float:
        """Seconds of one layer's routed experts, among which the tokens are divided evenly."""
        layout, hidden = self.work.layout, self.work.size.hidden
        is_expert_parallel = layout.expert > 1  # otherwise each expert is cut by tensor parallelism
        local, shards = layer.experts / layout.expert, 1 if is_expert_parallel else layout.tensor
        assigned = tokens * layer.active_experts / (layout.tensor if is_expert_parallel else 1)
        width = layer.expert / (3 * hidden)
        share = fill_tiles(assigned / local, hidden, width / shards, tile=self.constants.tile)
        computing = 2 * assigned * layer.expert / (self._rate(self.work.precision) * share)
        return math.hypot(computing, local * layer.expert * self._width / self._bandwidth) / shards

    def _attention(self, tokens: float, batch: TokenBatch, passes: _Passes) -> float:
        rate = self.cluster.gpu.flops("fp32" if self.work.precision == "fp32" else "bf16") * self.constants.attention
        if self.work.attention_tflops:
            rate = min(rate, self.work.attention_tflops * 1e12)
        return tokens * self.work.size.attention_flops(batch.length) * passes.attention / rate

    def _traffic(self, tokens: float, passes: _Passes) -> float:
        numbers = sum(layer.count * layer.matrix_numbers for layer in self.work.size.layers)
        return tokens * numbers * self._width * self.constants.traffic * passes.traffic / self._bandwidth

    def _collectives(self, tokens: float, passes: _Passes) -> float:
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
        ranks = layout.data * layout.context
        if layout.sharding != "weights" or ranks == 1:
            return 0.0
        reduces = passes.trains and not self.work.lora_rank
        seconds = 0.0
        for weights, size, stride in self._weight_groups(ranks):
            group = min(size, layout.shard_group or size)
            seconds += passes.gathers * network.gather(weights * BF16, group, stride)
            if reduces:  # gradients in float32
                seconds += network.gather(weights * 4, group, stride)
                seconds += network.reduce(weights * 4 / group, size // group, stride * group)
        layers = self.work.size.layer_count / layout.pipeline
        seconds += (layers - 1) * (passes.gathers + reduces) * network.latency(ranks, layout.tensor)
        return _exposed(seconds, busy, self.constants.overlap)

    def _weight_groups(self, ranks: int) -> list[tuple[float, int, int]]:
        """Return (weights of a device's stage, ranks that share them, stride) of the dense part and of the experts."""
        layout, size = self.work.layout, self.work.size
        experts = size.expert_parameters / layout.pipeline
        dense = (size.parameters - size.expert_parameters) / layout.pipeline / layout.tensor
        if layout.expert == 1:
            return [(dense + experts / layout.tensor, ranks, layout.tensor)]
        copies = max(1, ranks * layout.tensor // layout.expert)
        return [(dense, ranks, layout.tensor), (experts / layout.expert, copies, layout.expert)]

    def _activation_transfer(self, tokens: float, busy: float) -> float:
        """Seconds of moving each layer's input to the host and back that nothing hides."""
        if not self.work.offload_activations:
            return 0.0
        moved = 2 * tokens * self.work.size.hidden * BF16 * self.work.size.layer_count / self.work.layout.pipeline
        return _exposed(moved / (self.constants.host_gb_s * 1e9), busy, 0.9)

    def _optimizer(self) -> PassTime:
        """Seconds of one optimizer step with the collectives that come once a step."""
        work, layout, network = self.work, self.work.layout, self.network
        ranks = layout.data * layout.context
        if work.lora_rank:
            adapters = work.size.lora_parameters(work.lora_rank) / layout.tensor / layout.pipeline
            groups = [(adapters, ranks, layout.tensor)]
        else:
            groups = self._weight_groups(ranks)
        shards = layout.shard_group or ranks
        owned = sum(weights / (1 if layout.sharding == "none" else min(size, shards)) for weights, size, _ in groups)
        collectives = 0.0
        if layout.sharding != "weights" or work.lora_rank:
            for weights, size, stride in groups:
                collectives += network.gather(weights * 4, size, stride) + network.gather(weights * BF16, size, stride)
            collectives *= 1 - self.constants.overlap
        seconds = owned * ADAM_BYTES / self._bandwidth
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
        adapters = 2.0 if work.lora_rank else 0.0  # they read and write twice as much again, in kernels of their own
        scores = 1.0 if work.recompute != "none" else 0.0
        weights = 0.0 if work.lora_rank else 1.0  # gradients of frozen weights are not computed
        return cls(
            True,
            matmul=2 + again + weights,
            attention=4 + scores,  # backward has 2.5 times the products (2307.08691), and is slower at them
            head=2 + weights + work.recomputes_head,
            traffic=(3 + again) * (1 + adapters),
            launches=(2.5 + again) * (1 + adapters),
            exchanges=2 + again,
            gathers=2,
        )


def fill_tiles(rows: float, inputs: float, outputs: float, *, tile: float) -> float:
    """Return the share of its best rate that a product of this shape reaches: thin ones leave tiles partly empty."""
    return 1 / (1 + tile * (1 / max(1.0, rows) + 1 / inputs + 1 / max(1.0, outputs)))


def _exposed(collective: float, busy: float, overlap: float) -> float:
    """Return what a collective adds to computation that can hide the share ``overlap`` of it, if it is long enough."""
    hidden = min(overlap * collective, busy)
    return collective - hidden
