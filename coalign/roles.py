"""The roles that a model can play in a run, and what a worker is told about its model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from coalign.types import Stats

if TYPE_CHECKING:
    from torch import Tensor

    from coalign.backends.objective import Objective
    from coalign.config.schema import RewardConfig
    from coalign.data.batch import Batch
    from coalign.environments.loop import EnvironmentFunction


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

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int, adopt: bool = False) -> None: ...


@dataclass(frozen=True, slots=True)
class Context:
    """What a worker knows of its place in the run. ``rank`` counts within the model's process group, ``replica`` those
    groups (or single processes) of the model."""

    model: str = "model"
    replica: int = 0
    rank: int = 0
    world_size: int = 1
    device: str = "cpu"
    threads: int | None = None
    seed: int = 0
    steps: int = 1  # training steps of the run: the length of a learning-rate schedule
    tokens: int | None = None  # tokens to train on before the run ends: the length of one that counts tokens
    samples_per_prompt: int = 1
    sample_tokens: int | None = None  # of the longest sample, its prompt included, that all models which read it take
    loss: Objective | None = None  # what the model trains with
    rewards: tuple[RewardConfig, ...] = ()  # reward functions, for the reward module
    adapter_rank: int | None = None  # of the adapters that travel beside the weights of this model, not merged
    whole_groups: bool = True  # whether the rows of a group have to be on one rank: for the loss, to share the prompt
    environment: EnvironmentFunction | None = None  # how a policy's samples come about; None: one response to a prompt
    tokenizer: str | None = None  # directory of the policy's tokenizer, for modules that read text
    chat_template: str = "auto"  # as `data.chat_template` says it, for what an environment says
    rendezvous: str | None = None  # "host:port" where the ranks of one model meet
    output: str | None = None  # the run folder, for what a process writes by itself: traces, what filled its memory

    @property
    def process(self) -> str:
        """A name for files: `trainer_rank0` of a group, `policy_replica0` of independent replicas."""
        return f"{self.model}_rank{self.rank}" if self.world_size > 1 else f"{self.model}_replica{self.replica}"
