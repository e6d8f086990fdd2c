"""What happens to groups of samples on their way to a step, for whoever listens (`Environment.listen`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from coalign.cluster.batch_ref import BatchRef
from coalign.cluster.future import Future
from coalign.data.batch import Batch
from coalign.types import Stats

if TYPE_CHECKING:
    from coalign.engine.environment import Environment
    from coalign.engine.rollouts.pool import ReadyGroups


@dataclass(frozen=True)
class CollectedBundle:
    """A bundle whose calls have ended.

    ``samples`` is, or will be, what `begun` returned for it. ``prompted`` are the groups of its prompts, ``kept`` those
    that the filter kept, and ``continued`` those that the next rollout continues (None: not known yet). ``stats`` are
    its metrics.
    """

    samples: Future | BatchRef
    prompted: list[int]
    kept: list[int]
    continued: set[int] | None
    stats: Stats


class RolloutEvents:
    """Methods that the Environment calls; each does nothing, and a listener overrides what it needs.

    The loop waits until a method returns.
    """

    def drawn(self, step: int, version: int, bundles: Sequence[Batch]) -> None:
        """Prompts were drawn for ``step``, in the bundles that start with them, at this weight version."""

    def begun(self, samples: Future) -> Future | None:
        """The flow was called; ``samples`` will be the complete groups, before any filter.

        Returns what `collected` will need of them, which no step waits for and a checkpoint keeps; None: nothing.
        """

    def repeated(self, prompts: Batch, version: int) -> None:
        """Prompts of a checkpoint, whose samples were not complete, go through the flow again."""

    def collected(self, bundle: CollectedBundle) -> None:
        """A bundle with something from `begun` has ended, and its groups wait for a step."""

    def expired(self, groups: Sequence[ReadyGroups]) -> None:
        """Groups were dropped because they are older than `runtime.max_staleness` allows."""

    def taken(self, step: int, waited: Tensor | None, trained: Tensor | None) -> None:
        """Groups i64[N] left the pool for ``step``, which trains on others if `replay` adds or leaves out some."""

    def resumed(self, step: int, environment: Environment) -> None:
        """The run goes on from the state saved after ``step``."""
