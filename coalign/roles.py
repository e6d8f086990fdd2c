"""The roles that a model can play in a run, and ``Context``: what a worker knows of its model and run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from coalign.types import Stats

if TYPE_CHECKING:
    from torch import Tensor

    from coalign.algorithms.objective import Objective
    from coalign.config.schema import ImagesConfig, RewardConfig
    from coalign.data.batch import Batch
    from coalign.data.messages import ReasoningPolicy
    from coalign.environments.loop import Environments


class Scorer(Protocol):
    """A model that adds columns to a batch."""

    def forward_step(self, batch: Batch, *, into: str | None = None) -> Mapping[str, Any]: ...


class Trainable(Scorer, Protocol):
    """A model that learns."""

    def train_step(self, batch: Batch, *, loss: str | None = None) -> Stats: ...

    def eval_step(self, batch: Batch, *, loss: str | None = None) -> Stats: ...

    def export_weights(self, *, changing: bool = False) -> Iterator[tuple[str, Tensor]]: ...


class Rollout(Protocol):
    """A model that generates."""

    def generate(self, prompts: Batch, **sampling: Any) -> Batch: ...

    def roll(
        self, new: Sequence[tuple[int, Batch, Mapping[str, Any]]], seconds: float
    ) -> tuple[int | None, Batch | None, Stats, int]: ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int, adopt: bool = False) -> None: ...


@dataclass(frozen=True, slots=True)
class Context:
    """A worker's knowledge of its model and of the run.

    ``rank`` counts within the model's process group; ``replica`` counts these groups (or single processes).
    """

    model: str = "model"
    replica: int = 0
    rank: int = 0
    world_size: int = 1
    device: str = "cpu"
    threads: int | None = None
    seed: int = 0
    steps: int = 1  # training steps of the run: the length of a learning-rate schedule
    tokens: int | None = None  # tokens to train on before the run ends: the same for a schedule in tokens
    samples_per_prompt: int = 1
    sample_tokens: int | None = None  # longest prompt and response together that every model accepts
    loss: Objective | None = None  # what the model trains with
    rewards: tuple[RewardConfig, ...] = ()  # reward functions, for the reward module
    adapter_rank: int | None = None  # rank of LoRA adapters that are synced separately, not merged into the weights
    routing_replay: bool = False  # a policy records the experts that it chooses; its trainer chooses them again
    records_logprobs: bool = False  # the trainer returns its log-probs of what it learns from, for `rollouts/`
    keep_groups: bool = True  # rows of a group stay on one rank, for the loss or to share the prompt
    tokens_only: bool = False  # ids without a token have no probability: in all that samples, and in what it trains
    recompute_kv: bool = True  # new weights replace the keys and values of a policy's unfinished responses
    environments: Environments = field(default_factory=dict)  # the policy's; none: one response to a prompt
    tokenizer: str | None = None  # directory or hub's name of the policy's tokenizer, for modules that read text
    trust_tokenizer: bool = False  # whether code that comes with it may run
    chat_template: str = "auto"  # `data.chat_template` (of a file its text), for environments and what is saved
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reasoning: ReasoningPolicy | None = None
    images: ImagesConfig | None = None  # `data.images`; None: a run that reads text alone
    rendezvous: str | None = None  # "host:port" where the ranks of one model meet
    output: str | None = None  # the run folder, for traces and memory reports of a process

    @property
    def process(self) -> str:
        """A name for files: `trainer_rank0` of a group, `policy_replica0` of independent replicas."""
        return f"{self.model}_rank{self.rank}" if self.world_size > 1 else f"{self.model}_replica{self.replica}"
