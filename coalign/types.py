"""The records that every part of Coalign exchanges, and the protocols of the three roles a model can play.

Nothing here computes: shapes and meanings only. ``T`` is a number of tokens, ``N`` a number of sequences, ``V`` a
vocabulary. Everything that belongs to a token stands *at* that token: ``logprobs[t]`` is the log-probability of
``tokens[t]`` given what came before it, ``values[t]`` is the value of the state in which ``tokens[t]`` was chosen. So
the first token of a sequence has no log-prob (0.0, and it is never in a loss mask).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    pass

# The columns that Coalign's own parts produce and consume: name -> dtype. A column outside of these tables is welcome;
# its kind is then read from its leading dimension (see Batch.with_).
TOKEN_COLUMNS: Mapping[str, torch.dtype] = {
    "tokens": torch.int32,  # prompt and response, end to end
    "loss_mask": torch.bool,  # True where the token is trained on (the policy chose it)
    "rollout_logprobs": torch.float32,  # the sampler's log-prob of each chosen token, at the sampling temperature
    "versions": torch.int32,  # weight version that chose the token, -1 for tokens nobody chose
    "ref_logprobs": torch.float32,
    "old_logprobs": torch.float32,  # the trainer's own, before this step's first update
    "values": torch.float32,
    "token_rewards": torch.float32,  # reward shaped per token (KL penalty inside)
    "advantages": torch.float32,
    "returns": torch.float32,
    "turn_rewards": torch.float32,  # what an environment gave for a turn, at the turn's last trained token
    "label": torch.float32,  # how right a step is, at the token where a process reward model judges it
    "candidates": torch.int32,  # [T, K]: token ids whose log-probs a loss compares (a teacher's likeliest, + and -)
    "teacher_logprobs": torch.float32,  # [T, K]: the teacher's log-probs of the candidates
}
SEQUENCE_COLUMNS: Mapping[str, torch.dtype] = {
    "group": torch.int64,  # id of the prompt as drawn in this run: unique per draw, equal for its n samples
    "index": torch.int32,  # which of the n samples
    "prompt_length": torch.int32,
    "status": torch.uint8,  # a Status
    "samples": torch.int32,  # of a prompt, where it has a number of its own
    "max_new_tokens": torch.int32,  # of a response, where it has a limit of its own
    "update": torch.int32,  # of a training step, which of its updates the row is for (by whoever cut it over the ranks)
    "expected_tokens": torch.int32,  # that a response will still take, as far as known: prompts are shared out by it
    "reward": torch.float32,
    "preference": torch.float32,  # higher is better within a group; of a single response: 1 desirable, 0 not
    "margin": torch.float32,  # how much better a response is than the worst of its group, as the data set says
    "reference_point": torch.float32,  # KTO's z0, the same for the whole batch
    "baseline": torch.float32,  # what a reward is compared with (ReMax: that of the greedy response)
}
# Sequence columns may also be Python lists of length N (`rows`: the data set's row as a dict).


class Status(IntEnum):
    """How a sequence ended. ERROR rows are counted and dropped before any baseline or loss sees them; PARTIAL ones are
    not at their end: they go on in a later roll-out (or, cut for good, are dropped)."""

    OK = 0
    TRUNCATED = 1
    ERROR = 2
    PARTIAL = 3


@dataclass(slots=True)
class Sample:
    """One prompt with one response: what people read and what reward functions receive.

    tokens i32[T], loss_mask bool[T], logprobs f32[T] (the sampler's). ``versions`` is run-length coded:
    ``[(version, tokens), ...]`` over the chosen tokens only. ``reward`` is None until somebody scored the sample;
    0.0 is a reward. ``response`` leaves special tokens out, ``raw_response`` keeps them.
    """

    group: int
    index: int
    tokens: Tensor
    loss_mask: Tensor
    logprobs: Tensor
    versions: list[tuple[int, int]] = field(default_factory=list)
    prompt: str = ""
    response: str = ""
    raw_response: str = ""
    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    turn_rewards: Tensor | None = None  # f32[T], what an environment gave, at the last token of each turn
    status: Status = Status.OK
    messages: list[dict[str, Any]] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)  # the data set's row


@dataclass(frozen=True, slots=True)
class Stat:
    """A mean that merges exactly: (sum, count). Merging over micro-batches, ranks or steps gives the global mean."""

    sum: float
    count: float = 1.0

    def __add__(self, other: Stat) -> Stat:
        return Stat(self.sum + other.sum, self.count + other.count)

    @property
    def value(self) -> float:
        """The mean; NaN when nothing was counted."""
        return self.sum / self.count if self.count else float("nan")

    @staticmethod
    def of(values: Tensor, mask: Tensor | None = None) -> Stat:
        """The mean of ``values`` ([T] or [N]) where ``mask`` (same shape, bool) is True; accumulated in float64."""
        if mask is not None:
            values = values[mask]
        return Stat(values.detach().double().sum().item(), float(values.numel()))


@dataclass(frozen=True, slots=True)
class Max:
    """A maximum that merges exactly."""

    value: float

    def __add__(self, other: Max) -> Max:
        return Max(max(self.value, other.value))


@dataclass(frozen=True, slots=True)
class Total:
    """A sum that merges exactly (tokens processed, samples dropped)."""

    value: float

    def __add__(self, other: Total) -> Total:
        return Total(self.value + other.value)


@dataclass(frozen=True, slots=True)
class EffectiveSize:
    """The effective sample size of weights as a share of their number, (Σw)² / (n Σw²), that merges exactly."""

    count: float
    sum: float
    squares: float

    def __add__(self, other: EffectiveSize) -> EffectiveSize:
        return EffectiveSize(self.count + other.count, self.sum + other.sum, self.squares + other.squares)

    @property
    def value(self) -> float:
        """1 for equal weights, near 0 if a few outweigh all others; NaN when there is none above 0."""
        return self.sum**2 / (self.count * self.squares) if self.squares else float("nan")

    @staticmethod
    def of(weights: Tensor) -> EffectiveSize:
        """Of ``weights`` (any shape, none negative); accumulated in float64."""
        exact = weights.detach().double()
        return EffectiveSize(float(exact.numel()), exact.sum().item(), exact.square().sum().item())


Metric = Stat | Max | Total | EffectiveSize
Stats = dict[str, Metric]


def merge_stats(many: Iterable[Mapping[str, Metric]]) -> Stats:
    """Merge dictionaries of metrics; a name absent from one of them counts nothing there."""
    merged: Stats = {}
    for stats in many:
        for name, metric in stats.items():
            merged[name] = merged[name] + metric if name in merged else metric
    return merged


@dataclass(frozen=True, slots=True)
class LossInput:
    """What a loss may read of one micro-batch. ``[T]`` unless said; absent columns are None.

    T counts the *trained* tokens only (those of the loss mask, in order): the framework leaves the others out before
    the language-model head, so no loss has to mask and no logits are computed for prompts. ``old`` is the anchor of
    the importance ratio (equal to ``logprobs.detach()`` on the first update of a batch), ``rollout`` the sampler's
    log-probs, ``values`` the value head's *current* prediction (with gradient) and ``old_values`` the one made at
    rollout time.
    """

    segment: Tensor  # i64, which sequence each token belongs to, 0..N-1, never decreasing
    sequences: int  # N; a sequence without trained tokens has no entry in segment
    logprobs: Tensor | None = None  # with gradient; None for a model without a language-model head
    entropy: Tensor | None = None  # of the full next-token distribution; only if the loss asked for it
    old: Tensor | None = None
    rollout: Tensor | None = None
    ref: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    values: Tensor | None = None
    old_values: Tensor | None = None
    scores: Tensor | None = None  # [N], sequence-level head output with gradient
    candidate_logprobs: Tensor | None = None  # [T, K], of the column `candidates`; only if the loss asked for it
    collision: Tensor | None = None  # log Σ p² of the full next-token distribution, no gradient; only if asked for
    group: Tensor | None = None  # i64[N], which group each sequence belongs to, 0..groups-1, never decreasing
    groups: int = 0  # G; the sequences of a group are compared with each other (chosen and rejected)
    columns: Mapping[str, Any] = field(default_factory=dict)  # every column of the micro-batch ([T] likewise), by name


@dataclass(frozen=True, slots=True)
class LossOutput:
    """A loss's values and statistics; the framework sums and divides.

    The loss's attribute ``per`` says what a value stands for: ``token`` ([T], also without the attribute),
    ``sequence`` ([N]), ``group`` ([G]), or ``batch`` ([1]: the loss compares everything with everything, so an update
    is computed as one micro-batch). ``aggregations`` names the aggregations that a loss per token is meant for, where
    those are not all.
    """

    value: Tensor
    stats: Stats = field(default_factory=dict)


Loss = Callable[..., LossOutput]  # loss(x: LossInput, *, keyword-only configuration) -> LossOutput
