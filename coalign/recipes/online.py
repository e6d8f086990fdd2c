"""The bases of recipes with rollouts: models, flow, and the divergence from the reference as a part of the reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from coalign.algorithms.divergence import FixedKL
from coalign.algorithms.shaping import sequence_kl_reward, shape_reward
from coalign.cluster.batch_ref import BatchRef
from coalign.cluster.future import Future
from coalign.config.schema import RunConfig
from coalign.engine.engine import Engine, RunData
from coalign.engine.flow import AbsentScorer
from coalign.roles import Rollout, Scorer, Trainable
from coalign.types import Stats

if TYPE_CHECKING:
    from coalign.algorithms.objective import Objective
    from coalign.cluster.cluster import Cluster
    from coalign.cluster.dist import DistModel
    from coalign.engine.reference import BaseWeights
    from coalign.launch.plan import Plan


class Online(Engine):
    """Prompts in, a policy out that earns more reward.

    ``scores`` names the models that score samples; a configuration may leave some out.
    """

    trainer: DistModel[Trainable]
    reference: DistModel[Scorer] | BaseWeights | AbsentScorer = AbsentScorer()

    models = {"policy": Rollout, "reference": Scorer, "reward": Scorer, "trainer": Trainable}
    sync = [("trainer", "policy")]
    scores: ClassVar[tuple[str, ...]] = ("reference", "reward")
    unread = ("pairs", "kl")
    defaults = {
        "loss": {"fn": "policy_gradient"},
        "models": {
            "policy": {"module": "native"},
            "trainer": {"module": "fsdp", "like": "policy"},
            "reference": {"module": "fsdp", "like": "trainer", "frozen": True},
        },
    }

    def env_flow(self, prompts: BatchRef) -> Any:
        return self.add_scores(self.policy.generate(prompts))

    def add_scores(self, out: BatchRef | Future) -> Future:
        """Add the columns of the models in ``scores`` to the samples."""
        return self.join(out, *[getattr(self, name).forward_step(out) for name in self.scores])  # side by side

    def train_flow(self, batch: BatchRef) -> Any:
        return self.trainer.train_step(self.apply(self.advantage, batch))


class KLInReward(Online):
    """The divergence from the reference is subtracted from the reward (section `kl`), and is not part of the loss.

    It is charged at each token (k1), with a fixed or adaptive coefficient. Without `kl`, or with `kl.coef` 0, there is
    no reference.
    """

    unread = ("pairs",)

    def __init__(self, plan: Plan, cluster: Cluster, data: RunData | None = None) -> None:
        super().__init__(plan, cluster, data)
        self.kl = plan.kl() if plan.kl else FixedKL(coef=0.0)

    @classmethod
    def roles(cls, config: RunConfig, loss: Objective | None) -> Mapping[str, type]:
        charged = config.kl is not None and config.kl.arguments.get("coef") != 0
        return {name: role for name, role in cls.models.items() if charged or name != "reference"}

    @classmethod
    def check(cls, config: RunConfig, loss: Objective | None) -> None:
        if loss is not None and getattr(loss.loss, "kl_coef", 0.0):
            raise ValueError(
                f"loss.kl_coef: in `{config.algorithm}` the KL penalty is part of the reward; set kl.coef and leave "
                "loss.kl_coef at 0, or the divergence is charged twice"
            )

    @property
    def shaping(self) -> Callable[..., Any] | None:
        """Rewards per token, the divergence subtracted."""
        self.read_section("kl")
        return partial(shape_reward, kl_coef=self.kl.coef, turn_weight=self.plan.turn_weight)

    def after_step(self, stats: Stats) -> None:
        if "kl" in stats:
            self.kl.update(stats["kl"].value, samples=int(stats["samples/count"].value))

    def state_dict(self) -> dict[str, Any]:
        return self.kl.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kl.load_state_dict(state)


class KLOfResponse(KLInReward):
    """A response is one action: its whole divergence is subtracted from its reward before baselines are computed."""

    @property
    def shaping(self) -> Callable[..., Any] | None:
        """One reward for each response, the divergence subtracted."""
        self.read_section("kl")
        return partial(sequence_kl_reward, kl_coef=self.kl.coef) if self.reference else None


def refuse_greedy(config: RunConfig) -> None:
    """Raise ValueError for temperature 0, at which all responses to a prompt are the same."""
    if config.models["policy"].sampling.temperature == 0:
        raise ValueError(
            f"models.policy.sampling.temperature is 0, so all responses to a prompt would be the same, and "
            f"`{config.algorithm}` compares them; use 1 (usual), or anything above 0"
        )


def require_several_samples(config: RunConfig) -> None:
    """Raise ValueError for one sample per prompt, or for equal samples, where samples are each other's baseline."""
    refuse_greedy(config)
    if config.runtime.samples_per_prompt == 1:
        raise ValueError(
            f"runtime.samples_per_prompt is 1: `{config.algorithm}` compares the samples of one prompt with each "
            "other; use 2 or more (8 is usual), or `ppo`, `reinforce_pp` or `remax`"
        )


def refuse_kl_in_reward(config: RunConfig) -> None:
    """Raise ValueError for the section `kl`, where the divergence from the reference is part of the loss."""
    if config.kl:
        raise ValueError(
            f"kl: in `{config.algorithm}` the divergence from the reference is part of the loss; set loss.kl_coef and "
            "leave kl out"
        )
