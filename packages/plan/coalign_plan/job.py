"""What is to be predicted: the models of a step, their layouts, and the samples that go through them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist
from typing import Literal

from coalign_plan.model_size import ModelSize

Sharding = Literal["none", "optimizer", "gradients", "weights"]  # over data-parallel ranks: DDP, ZeRO-1, 2, 3 or FSDP
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Parallelism:
    """How one model is spread over devices. ``data``: data-parallel ranks of a trainer, or replicas of an engine.

    Expert parallelism uses the ranks of the others (it needs none of its own): for a trainer those of data, context
    and tensor parallelism, for an engine those of one replica. ``shard_group`` is the number of data-parallel ranks
    that share a copy (HSDP); None: all of them.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    data: int = 1
    virtual_pipeline: int = 1
    sharding: Sharding = "weights"
    shard_group: int | None = None

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def replica_gpus(self) -> int:
        """Devices that hold one copy for a batch of its own."""
        return self.tensor * self.pipeline * self.context


@dataclass(frozen=True)
class ModelWork:
    """One model of a step.

    Models with the same ``group`` share its devices and take turns; models of different groups run beside each other.
    ``role``: "rollout" generates, "trainer" trains, "scorer" makes one forward pass over what was generated.
    ``micro_batch_tokens`` is that of one device's forward pass. ``precision`` is that of matrix products (bf16, fp8,
    fp4, fp32), ``weight_bytes`` a number of the weights that the device holds, ``kv_bytes`` one of keys and values.
    ``is_moved`` says that the model's states leave the devices (to host memory) while others of its group have them.
    """

    name: str
    role: Literal["rollout", "trainer", "scorer"]
    size: ModelSize
    layout: Parallelism
    group: str = "all"
    precision: str = "bf16"
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0
    micro_batch_tokens: int = 8192
    recompute: Recompute = "none"
    offload_optimizer: bool = False
    offload_weights: bool = False
    offload_activations: bool = False
    attention_tflops: float | None = None  # the most that the attention kernel reaches on any device
    recomputes_head: bool = False  # logits are not kept for the backward pass (fused losses)
    lora_rank: int | None = None
    is_moved: bool = False
    gathers_weights: bool = False  # an engine with the trainer's sharded weights, gathered for each decode step
    is_eager: bool = False  # an engine without captured graphs: each kernel is launched by the host
    max_sequences: int = 1024  # that one replica of an engine generates at once
    memory_share: float = 0.9  # share of a device's memory that an engine may use
    passes: int = 1  # times that a scorer or a trainer sees each sample in a step (PPO epochs)
    head_outputs: int | None = None  # 1 for a value or reward model; None: the vocabulary


@dataclass(frozen=True)
class LengthDistribution:
    """A distribution of response lengths in tokens: lognormal with this mean, cut at ``maximum``; or ``values``."""

    mean: float
    maximum: float
    sigma: float | None = None  # deviation of the logarithm; None: one in a hundred reaches the maximum, at most 1
    values: tuple[float, ...] = ()

    @classmethod
    def from_file(cls, path: Path) -> LengthDistribution:
        """Read one length a line. Raises ValueError for a line that is not a positive number."""
        values = []
        for number, line in enumerate(path.read_text(encoding="utf-8").split(), 1):
            try:
                values.append(float(line))
            except ValueError:
                raise ValueError(f"{path}: line {number} is '{line}'; each line should be a length in tokens") from None
        if not values or min(values) <= 0:
            raise ValueError(f"{path} should hold one length in tokens (above 0) a line")
        return cls(sum(values) / len(values), max(values), values=tuple(sorted(values)))

    @classmethod
    def parse(cls, text: str) -> LengthDistribution:
        """Read `mean,max`, such as `2000,8192`, or the path of a file of lengths. Raises ValueError."""
        numbers = text.split(",")
        try:
            mean, maximum = (float(number) for number in numbers)
        except ValueError:
            if Path(text).is_file():
                return cls.from_file(Path(text))
            raise ValueError(f"lengths '{text}' should be MEAN,MAX in tokens, or a file of one length a line") from None
        if not 0 < mean <= maximum:
            raise ValueError(f"lengths '{text}': the mean should be above 0 and not above the maximum")
        return cls(mean, maximum)

    def shares(self, count: float) -> list[tuple[float, float]]:
        """Return (share of all, tokens), shortest first; the tail is resolved down to one of ``count`` samples."""
        points = _tail_points(max(2, round(count)))
        if self.values:
            last = len(self.values) - 1
            return [(share, self.values[min(last, int(at * len(self.values)))]) for share, at in points]
        if self.mean >= self.maximum:
            return [(1.0, self.maximum)]
        normal, sigma = NormalDist(), self.spread
        draws = [(share, math.exp(sigma * normal.inv_cdf(at))) for share, at in points]
        low, high = 0.0, 10 * self.maximum  # bisect the scale whose mean, after the cut, is the one asked for
        for _ in range(40):
            scale = (low + high) / 2
            if sum(share * min(self.maximum, scale * draw) for share, draw in draws) < self.mean:
                low = scale
            else:
                high = scale
        return [(share, max(1.0, min(self.maximum, high * draw))) for share, draw in draws]

    @property
    def spread(self) -> float:
        """Standard deviation of the logarithm of the length."""
        if self.sigma is not None:
            return self.sigma
        return (
            min(1.0, max(0.05, math.log(self.maximum / self.mean) / 2.33 + 0.2)) if self.maximum > self.mean else 0.05
        )


@lru_cache(maxsize=64)
def _tail_points(count: int) -> list[tuple[float, float]]:
    """Return (share, quantile) pairs: 40 of the lower seven eighths, then two for each halving of the rest."""
    points = [(0.875 / 40, 0.875 * (i + 0.5) / 40) for i in range(40)]
    rest = 0.125
    while rest > 1.5 / count:
        points += [(rest / 4, 1 - rest * 7 / 8), (rest / 4, 1 - rest * 5 / 8)]
        rest /= 2
    return [*points, (rest, 1 - rest / 2)]


@dataclass(frozen=True)
class JobShape:
    """One step of a run: ``prompts`` x ``samples`` sequences through ``models``.

    ``max_staleness`` 0 takes turns; 1 and more generate beside training, at most that many weight versions ahead.
    ``partial_rollout`` continues unfinished samples with new weights; without it a weight sync waits for them.
    ``in_order``: a step trains on the samples drawn for it; without it, on those complete first. ``oversample`` begins
    that many times the prompts and takes those that are complete first. A job without a model of role "rollout" trains
    on data.
    """

    models: tuple[ModelWork, ...]
    prompts: int
    samples: int = 1
    prompt_tokens: float = 256.0
    responses: LengthDistribution = field(default_factory=lambda: LengthDistribution(1024, 4096))
    max_staleness: float = 0  # a fraction of a batch is possible in other systems
    partial_rollout: bool = True
    in_order: bool = True
    oversample: float = 1.0
    mini_batches: int = 1  # optimizer steps that a batch of rollouts is cut into
    is_padded: bool = False  # training computes each response up to the longest, as trainers without packing do
    shares_prompts: bool = False  # a group's prompt is computed once in training
    sync_every: int = 1  # steps between weight syncs
    reward_seconds: float = 0.0  # scoring outside of the devices, after generation
    overhead_seconds: float = 0.0  # everything else in a step: data, logging, the driver

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    @property
    def sequence_tokens(self) -> float:
        """Mean tokens of a sequence with its prompt."""
        return self.prompt_tokens + self.responses.mean

    @property
    def tokens(self) -> float:
        """Tokens of a step, prompts counted with each sample."""
        return self.sequences * self.sequence_tokens
