"""Stand-ins for models and functions in flows, where sections of the configuration decide what they do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from coalign.algorithms.segments import segment_count
from coalign.cluster.batch_ref import BatchRef
from coalign.cluster.future import Future

if TYPE_CHECKING:
    from coalign.cluster.cluster import Cluster
    from coalign.cluster.dist import DistModel
    from coalign.data.loader import Loader
    from coalign.engine.rollouts.unfinished import CompleteGroups
    from coalign.roles import Rollout, Trainable


class RolloutPolicy:
    """The policy that flows call: in `env_flow`, ``generate`` follows the section `rollout`.

    A call that names ``samples``, and a call in any other flow, generates complete groups of its prompts.
    """

    def __init__(self, model: DistModel[Rollout], unfinished: CompleteGroups) -> None:
        self._model, self._unfinished = model, unfinished

    def generate(self, prompts: BatchRef | Future, **sampling: Any) -> Future:
        """Generate responses to ``prompts``; see coalign.backends.engines.rollout_module.RolloutModule.

        With `rollout.round_tokens` the result holds the groups that are complete by now, not those of ``prompts``: in
        a flow, later calls take this result.
        """
        if self._unfinished.rolling_out and "samples" not in sampling:
            return self._unfinished.generate(self._model, prompts, **sampling)
        return self._model.generate(prompts, **sampling)

    def __getattr__(self, method: str) -> Any:
        return getattr(self._model, method)


class PtxTrainer:
    """The main model in a run with the section `ptx`: ``train_step`` mixes in the next rows of `ptx`."""

    def __init__(self, model: DistModel[Trainable], cluster: Cluster, loader: Loader, coef: float) -> None:
        self._model, self._cluster, self._loader, self._coef = model, cluster, loader, coef

    def train_step(self, batch: BatchRef | Future, **options: Any) -> Future:
        rows = self._cluster.put(self._loader.next())
        return self._model.train_step(batch, ptx=rows, ptx_coef=self._coef, **options)

    def __getattr__(self, method: str) -> Any:
        return getattr(self._model, method)


class AbsentScorer:
    """A scorer of the recipe that this run does not need: ``forward_step`` adds no columns. It counts as false."""

    def forward_step(self, batch: BatchRef | Future, *, into: str | None = None) -> BatchRef | Future:
        return batch

    def __bool__(self) -> bool:
        return False


def count_episode_tokens(loss_mask: Tensor, segment: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    """Count the trained tokens of each episode, by which a loss that averages over samples weighs its rows."""
    return {"episode_tokens": segment_count(segment[loss_mask], len(lengths)).int()}


@dataclass(frozen=True)
class FunctionChain:
    """Pure functions of columns, applied one after the other; arguments of a call go to ``main``."""

    functions: tuple[Callable[..., Any], ...]
    main: Callable[..., Any]


def chain(*functions: Callable[..., Any] | None, main: Callable[..., Any]) -> Callable[..., Any] | FunctionChain:
    """Chain the functions that are not None, in order; ``main``, which is one of them, if there is no other."""
    present = tuple(function for function in functions if function is not None)
    return main if len(present) == 1 else FunctionChain(present, main)
