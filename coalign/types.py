"""Records that all packages of Coalign exchange: columns of a batch, samples, metrics, inputs and outputs of losses.

``T`` is the number of tokens, ``N`` the number of sequences. A per-token value is stored *at* its token:
``logprobs[t]`` is the log-probability of ``tokens[t]`` given the tokens before it, and ``values[t]`` is the value of
the state in which ``tokens[t]`` was chosen. So the first token of a sequence has no log-prob: it holds 0.0 and is never
in a loss mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, cast

import torch
from torch import Tensor

# Dtypes of Coalign's own columns. A batch may have others; their leading dimension says whether they are per token (see
# Batch.with_). Sequence columns may also be Python lists of length N: `rows`, the data set's row of each as a dict, and
# in runs that read images `images`, a tuple of ImageSpan for each.
TOKEN_COLUMNS: Mapping[str, torch.dtype] = {
    "tokens": torch.int32,  # prompt and response, end to end
    "loss_mask": torch.bool,  # True where the token is trained on (the policy chose it)
    "rollout_logprobs": torch.float32,  # the sampler's log-prob of each chosen token, at the sampling temperature
    "versions": torch.int32,  # weight version that generated the token; -1: not generated
    "ref_logprobs": torch.float32,
    "old_logprobs": torch.float32,  # the trainer's own, before this step's first update
    "values": torch.float32,
    "token_rewards": torch.float32,  # reward shaped per token (KL penalty inside)
    "advantages": torch.float32,
    "returns": torch.float32,
    "turn_rewards": torch.float32,  # an environment's reward of a turn, at the turn's last trained token
    "turn_states": torch.int64,  # the state in which a turn begins, at its first token, as a number other than 0
    "high_covariance": torch.bool,  # True where the loss `kl_cov` holds the policy back
    "label": torch.float32,  # correctness of a step (0 to 1), at the token where a process reward model scores it
    "candidates": torch.int32,  # [T, K]: token ids whose log-probs a loss compares (a teacher's top K; "+" and "-")
    "teacher_logprobs": torch.float32,  # [T, K]: the teacher's log-probs of the candidates
    "routed_experts": torch.int16,  # [T, L, k]: the experts that the sampler chose in each layer; -1: not known
}
SEQUENCE_COLUMNS: Mapping[str, torch.dtype] = {
    "group": torch.int64,  # id of the prompt as drawn in this run: unique per draw, equal for its n samples
    "index": torch.int32,  # which of the n samples
    "branch": torch.int32,  # which row of an episode: those of one are neighbours, and count as one sample
    "episode_tokens": torch.int32,  # trained tokens of the row's episode, in all its rows
    "prompt_length": torch.int32,
    "status": torch.uint8,  # a Status
    "samples": torch.int32,  # number of samples of this prompt, where it has its own
    "max_new_tokens": torch.int32,  # token limit of this response, where it has its own
    "update": torch.int32,  # number of the update within a training step that uses the row, set by sharding
    "leaf": torch.int32,  # with `reduction: exact`: number of the micro-batch within its update, set by sharding
    "expected_tokens": torch.int32,  # estimate of the tokens that a response still needs; balances prompts
    "reward": torch.float32,
    "preference": torch.float32,  # higher is better within a group; single responses: 1 desirable, 0 undesirable
    "margin": torch.float32,  # from the data set: how much better it is than the worst of its group
    "reference_point": torch.float32,  # KTO's z0, the same for the whole batch
    "baseline": torch.float32,  # subtracted from the reward (ReMax: reward of the greedy response)
}


UNKNOWN_EXPERT = -1  # in `routed_experts`: not recorded, so the router chooses itself
SOURCE_KEY = "data_source"  # in every row of data: the source that it belongs to, by the row itself or by its file
ENVIRONMENT_KEY = "environment"  # in rows of a run with several environments: the one that plays it


class Status(IntEnum):
    """How a sequence ended.

    ERROR rows are counted, then dropped before any baseline or loss. PARTIAL rows are unfinished: a later rollout
    continues them, or they are dropped.
    """

    OK = 0
    TRUNCATED = 1
    ERROR = 2
    PARTIAL = 3

    @property
    def label(self) -> str:
        """The name in files: `truncated`."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Neighbouring tokens of a sequence in whose place a model reads features of an image.

    The tokens start..start+length-1 are placeholders. They stand for the image's features first..first+length-1: some
    families cut an image into tiles, with text between their features. ``grid``: what the tower reads of the image, in
    patches (frames or tiles, rows, columns). Pixels are not part of it: ``path`` is a file whose content has the hash
    ``image``; without a path it is a picture of coalign.data.images.probe. ``seconds``: between two steps of a video's
    grid; None for an image.

    Example: an image of 4 x 6 patches, of which the tower makes 2 x 3 features.

        >>> ImageSpan("9f86d081", "cat.png", start=1, length=6, grid=(1, 4, 6)).patches
        24
    """

    image: str  # sha256 of the file
    path: str
    start: int
    length: int
    grid: tuple[int, int, int]
    first: int = 0
    seconds: float | None = None

    @property
    def stop(self) -> int:
        return self.start + self.length

    @property
    def is_video(self) -> bool:
        return self.seconds is not None

    @property
    def patches(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]


@dataclass(frozen=True, slots=True)
class Response:
    """A policy's response: tokens i32[R], logprobs f32[R], versions i32[R].

    ``experts`` i16[P + R, L, k]: those that computed the prompt and the response, if the generator records them; -1 for
    the last token, which was not fed. OK after an end token or stop string, TRUNCATED at the limit or the end of the
    context, PARTIAL if cut before.
    """

    tokens: Tensor
    logprobs: Tensor
    versions: Tensor
    status: Status
    experts: Tensor | None = None


@dataclass(slots=True)
class Sample:
    """One prompt with one response, as people read it and as reward functions receive it.

    tokens i32[T], loss_mask bool[T], logprobs f32[T] (the sampler's). ``versions`` is run-length encoded over the
    generated tokens: ``[(version, tokens), ...]``. ``reward`` is None until the sample is scored. ``response`` omits
    special tokens, ``raw_response`` keeps them. ``meta`` is the data set's row.

    Example: what a reward function sees of the row {"prompt": "1 + 1 =", "answer": "2"}.

        >>> sample = Sample(
        ...     group=0, index=0, tokens=torch.tensor([11, 12, 13, 14, 2]),
        ...     loss_mask=torch.tensor([False, False, False, True, True]), logprobs=torch.zeros(5),
        ...     versions=[(0, 2)], prompt="1 + 1 =", response=" 2", raw_response=" 2</s>", meta={"answer": "2"},
        ... )
        >>> float(sample.response.strip() == sample.meta["answer"])
        1.0
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
    turn_rewards: Tensor | None = None  # f32[T], an environment's rewards, at the last token of each turn
    status: Status = Status.OK
    messages: list[dict[str, Any]] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)
    images: tuple[ImageSpan, ...] = ()
    branch: int = 0  # which row of an episode


@dataclass(frozen=True, slots=True)
class Stat:
    """A mean as (sum, count), so that merging micro-batches, ranks or steps gives the exact global mean."""

    sum: float
    count: float = 1.0

    def __add__(self, other: Stat) -> Stat:
        return Stat(self.sum + other.sum, self.count + other.count)

    @property
    def value(self) -> float:
        """The mean; NaN if count is 0."""
        return self.sum / self.count if self.count else float("nan")

    @staticmethod
    def of(values: Tensor, mask: Tensor | None = None) -> Stat:
        """Average ``values`` where ``mask`` (same shape, bool) is True; accumulates in float64."""
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
    """Effective sample size of weights as a share of their number, (Σw)² / (n Σw²); merges exactly."""

    count: float
    sum: float
    squares: float

    def __add__(self, other: EffectiveSize) -> EffectiveSize:
        return EffectiveSize(self.count + other.count, self.sum + other.sum, self.squares + other.squares)

    @property
    def value(self) -> float:
        """1 for equal weights, near 0 if a few outweigh all others; NaN if none is above 0."""
        return self.sum**2 / (self.count * self.squares) if self.squares else float("nan")

    @staticmethod
    def of(weights: Tensor) -> EffectiveSize:
        """Measure ``weights`` (any shape, not negative); accumulates in float64."""
        exact = weights.detach().double()
        return EffectiveSize(float(exact.numel()), exact.sum().item(), exact.square().sum().item())


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean and variance of values: ``count``, ``mean``, and the sum of squared deviations from it.

    As a metric its value is the standard deviation of all values that were merged, not a mean of standard deviations.
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def std(self) -> float:
        """The population's; 0 without values."""
        return (self.squares / self.count) ** 0.5 if self.count else 0.0

    @property
    def value(self) -> float:
        return self.std

    def __add__(self, other: Moments) -> Moments:
        """Merge exactly, without a difference of large numbers (Chan, Golub and LeVeque, 1979)."""
        count = self.count + other.count
        if not count:
            return self
        difference, share = other.mean - self.mean, other.count / count
        squares = self.squares + other.squares + difference * difference * self.count * share
        return Moments(count, self.mean + difference * share, squares)

    @staticmethod
    def of(values: Tensor) -> Moments:
        """Measure ``values`` [N]; accumulates in float64."""
        values = values.detach().double()
        if not len(values):
            return Moments()
        mean = values.mean()
        return Moments(float(len(values)), mean.item(), (values - mean).square().sum().item())


Metric = Stat | Max | Total | EffectiveSize | Moments
Stats = dict[str, Metric]


def merge_stats(many: Iterable[Mapping[str, Metric]]) -> Stats:
    """Merge dictionaries of metrics by name. A name always has the same type of metric."""
    merged: Stats = {}
    for stats in many:
        for name, metric in stats.items():
            merged[name] = cast(Any, merged[name]) + metric if name in merged else metric
    return merged


@dataclass(frozen=True, slots=True)
class LossInput:
    """The inputs of a loss for one micro-batch. Columns are ``[T]`` unless noted, and None if absent.

    T counts *trained* tokens only, in order: the framework removes the others before the language-model head, so a loss
    needs no mask and no logits are computed for prompts. ``old`` is the anchor of the importance ratio (equal to
    ``logprobs.detach()`` in the first update of a batch). ``rollout`` is the sampler's log-probs. ``values`` is the
    value head's *current* prediction, with gradient; ``old_values`` was computed at rollout time.

    Example: a policy-gradient loss of two sequences with 2 and 1 trained tokens.

        >>> x = LossInput(
        ...     segment=torch.tensor([0, 0, 1]), sequences=2,
        ...     logprobs=torch.tensor([-1.0, -2.0, -3.0], requires_grad=True),
        ...     advantages=torch.tensor([1.0, 1.0, -1.0]),
        ... )
        >>> output = LossOutput(-x.logprobs * x.advantages)  # per token: the framework sums and divides
        >>> output.value.tolist()
        [1.0, 2.0, -3.0]
    """

    segment: Tensor  # i64: sequence number of each token, 0..N-1, never decreasing
    sequences: int  # N; a sequence without trained tokens has no entry in segment
    logprobs: Tensor | None = None  # with gradient; None for a model without a language-model head
    entropy: Tensor | None = None  # entropy of the full next-token distribution; only if the loss requests it
    old: Tensor | None = None
    rollout: Tensor | None = None
    ref: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    values: Tensor | None = None
    old_values: Tensor | None = None
    scores: Tensor | None = None  # [N]: output of a sequence-level head, with gradient
    candidate_logprobs: Tensor | None = None  # [T, K], of the column `candidates`; only if requested
    collision: Tensor | None = None  # log Σ p² of the full next-token distribution, no gradient; only if requested
    group: Tensor | None = None  # i64[N]: group of each sequence, 0..groups-1, never decreasing
    groups: int = 0  # G; sequences of a group are compared with each other (chosen and rejected)
    columns: Mapping[str, Any] = field(default_factory=dict)  # all columns of the micro-batch, token columns as [T]

    def require(self, name: str, because: str | None = None) -> Tensor:
        """The field ``name``. ValueError if it is missing; ``because`` names the setting of the loss that needs it."""
        if (value := getattr(self, name)) is None:
            reason = f" because loss.{because} is set" if because else ""
            raise ValueError(f"the loss needs `{name}`{reason}, but the batch does not have it")
        return value

    def require_column(self, name: str, because: str | None = None) -> Any:
        """The column ``name`` of the micro-batch. ValueError if it is missing; ``because`` as in `require`."""
        if name not in self.columns:
            reason = f" because loss.{because} is set" if because else ""
            have = sorted(self.columns)
            raise ValueError(f"the loss needs the column `{name}`{reason}, but the batch has only {have}")
        return self.columns[name]


@dataclass(frozen=True, slots=True)
class LossOutput:
    """The values and metrics of a loss; the framework sums and divides.

    What a value belongs to, the loss's attribute ``per`` says: ``token`` ([T], the default), ``sequence`` ([N]),
    ``group`` ([G]), or ``batch`` ([1]).
    """

    value: Tensor
    stats: Stats = field(default_factory=dict)
