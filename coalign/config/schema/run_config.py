"""A whole run, as one YAML file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, PrivateAttr

from coalign.config.errors import Conflict, Key, KeyLocations, suggest
from coalign.config.schema.data import DataConfig, SourceConfig
from coalign.config.schema.model import ModelConfig
from coalign.config.schema.rollout import CurriculumConfig, FilterConfig, ReplayConfig, RolloutConfig
from coalign.config.schema.runtime import RuntimeConfig, SyncConfig
from coalign.config.schema.section import (
    FUNCTIONS,
    Function,
    LossConfig,
    OneOrMore,
    OutputPath,
    ResultNeutral,
    RewardConfig,
    Section,
    check_rewards,
)


class PtxConfig(Section):
    """A language-modelling loss on other data, added to the policy's objective (PPO-ptx, 2203.02155)."""

    data: Annotated[OneOrMore[SourceConfig], Field(examples=["documents.jsonl"])] = []
    coef: NonNegativeFloat = 1.0
    """Weight of the negative log-likelihood per token in the policy's loss."""
    rows_per_step: PositiveInt = 8
    kind: Literal["documents", "conversations"] = "documents"

    def check(self) -> None:
        if not self.data:
            raise Conflict(("data",), "is missing: the rows to mix in")


class AdvantageConfig(Function):
    """A function of rewards and other columns that returns advantages."""

    home = "coalign.algorithms.advantages"


class CovarianceConfig(Function):
    """Holds back tokens whose log-prob and advantage rise together, which keeps the entropy up."""

    home = "coalign.algorithms.covariance"


class TruncatedConfig(Function):
    """Treatment of truncated responses before advantages are computed."""

    home = "coalign.algorithms.shaping"


class PairsConfig(Function):
    """Selects the responses of a group to compare."""

    home = "coalign.algorithms.comparisons"


class KLConfig(Function):
    """The coefficient of the penalty on divergence from the reference, fixed or adaptive."""

    home = "coalign.algorithms.divergence"


class RunConfig(Section):
    """A whole run, as one YAML file."""

    algorithm: str
    """A recipe (`sft`, `grpo`, `ppo`) or a dotted path to an Engine subclass."""
    seed: NonNegativeInt = 0
    output: ResultNeutral[Annotated[str, OutputPath()]] = "runs/run"
    """The run folder."""
    runtime: RuntimeConfig = RuntimeConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    curriculum: CurriculumConfig | None = None
    filter: Annotated[FilterConfig | None, Field(examples=[{"fn": "varied"}])] = None
    replay: Annotated[ReplayConfig | None, Field(examples=[{"fn": "mix"}])] = None
    reward: Annotated[OneOrMore[RewardConfig], Field(examples=[{"fn": "math"}])] = []
    """Reward functions, summed by weight."""
    truncated: Annotated[TruncatedConfig | None, Field(examples=[{"fn": "mask_truncated"}])] = None
    """Treatment of truncated responses before advantages are computed: a function of columns, such as `mask_truncated`
    (not trained on) or `scale_truncated` (their reward times `factor`)."""
    advantage: AdvantageConfig | None = None
    covariance: Annotated[CovarianceConfig | None, Field(examples=[{"fn": "clip_cov"}])] = None
    """Holds back tokens whose log-prob and advantage rise together, which keeps the entropy up: `clip_cov`, or `kl_cov`
    with the loss of that name."""
    pairs: Annotated[PairsConfig | None, Field(examples=[{"fn": "best_worst"}])] = None
    """Selects the responses of a group to compare, in recipes that learn from comparisons of the policy's samples."""
    loss: LossConfig | None = None
    ptx: PtxConfig | None = None
    """A language-modelling loss on other data, in each update of the main model."""
    kl: KLConfig | None = None
    """The penalty on divergence from the reference, in recipes that put it into the reward."""
    sync: SyncConfig = SyncConfig()
    models: dict[str, ModelConfig] = {}

    _locations: KeyLocations = PrivateAttr(default_factory=lambda: KeyLocations({}))

    @property
    def locations(self) -> KeyLocations:
        """Where each key was written; empty if the configuration was not loaded from YAML."""
        return self._locations

    def check(self) -> None:
        self._check_model_names()
        self._check_environments()
        self._check_rewards()
        self._check_lengths()

    def _check_model_names(self) -> None:
        names = [*self.models, *([FUNCTIONS] if any(reward.fn for reward in self.reward) else [])]
        profiled = self.runtime.profile.models if self.runtime.profile else []
        named: list[tuple[Key, str]] = [
            *(
                (("runtime", "colocation", i), name)
                for i, group in enumerate(self.runtime.colocation)
                for name in group
            ),
            *((("runtime", "profile", "models", i), name) for i, name in enumerate(profiled)),
        ]
        for key, name in named:
            if name not in names:
                raise Conflict(key, f"there is no model '{name}'{suggest(name, names)}")
        for name, model in self.models.items():
            if model.spread_samples and self.rollout.oversample > 1:
                why = "ends a rollout by groups that are complete, which no replica sees where samples are spread"
                raise Conflict(("models", name, "spread_samples"), f"rollout.oversample {why}; leave one of them out")

    def _check_environments(self) -> None:
        names = self.rollout.environments
        for split, sources in (("train", self.data.train), ("eval", self.data.eval)):
            for index, name in enumerate(source.environment for source in sources):
                if name is not None and name not in names:
                    problem = f"there is no '{name}' in rollout.environments{suggest(name, names)}"
                    raise Conflict(("data", split, index, "environment"), problem)

    def _check_rewards(self) -> None:
        check_rewards(self.reward)
        scorers = [name for name, model in self.models.items() if model.head == "reward" or model.judge]
        for index, reward in enumerate(self.reward):
            if reward.model is None or reward.model in scorers:
                continue
            key: Key = ("reward", index, "model")
            if reward.model not in self.models:
                near = suggest(reward.model, scorers or self.models)
                raise Conflict(key, f"there is no model '{reward.model}'{near}")
            raise Conflict(
                key,
                f"models.{reward.model} scores nothing: its head is `{self.models[reward.model].head}` (a reward "
                "model has `head: reward`, a judge has `judge`)",
            )
        if self.reward and "reward" in self.models and all(reward.model != "reward" for reward in self.reward):
            raise Conflict(("models", "reward"), "is not among the parts of `reward`; list it: {model: reward}")

    def _check_lengths(self) -> None:
        every, runtime = self.sync.every, self.runtime
        for name, model in self.models.items():
            key, config = ("models", name, "optimizer"), model.optimizer
            if config.unit == "tokens" and runtime.tokens is None:
                raise Conflict((*key, "unit"), "is `tokens`, so the run needs `runtime.tokens`, its length in tokens")
            endless = self.data.stream and runtime.steps is None
            if config.unit == "steps" and config.schedule != "constant" and endless:
                raise Conflict(
                    (*key, "schedule"),
                    f"is `{config.schedule}`, and a stream (data.stream) has no known number of steps: set "
                    "`runtime.steps`, or `unit: tokens` and `runtime.tokens`",
                )
        if runtime.max_staleness < every - 1:
            raise Conflict(
                ("sync", "every"),
                f"is {every}, so a batch is sampled from weights that are up to {every - 1} steps old: set "
                f"`runtime.max_staleness` to {every - 1} or more (it is {runtime.max_staleness})",
            )
        for name in ("eval_every", "save_every"):
            if getattr(runtime, name) % every:
                raise Conflict(
                    ("runtime", name),
                    f"is {getattr(runtime, name)}, no multiple of `sync.every` ({every}): between two syncs the model "
                    "that generates has older weights than those that are evaluated and saved",
                )
        if runtime.eval_every and not self.data.eval:
            raise Conflict(("runtime", "eval_every"), f"is {runtime.eval_every}, and there is no data.eval")
