"""Pipelines: stages run in order, round after round, each with the model that the round before has trained.

A reward model or reward functions behind HTTP.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from coalign.config.errors import Conflict
from coalign.config.schema.base import InputPath, OneOrMore, ResultNeutral, RewardConfig, Section, check_rewards
from coalign.config.schema.data import DataConfig
from coalign.config.schema.rollout import NativeConfig, SamplingConfig
from coalign.config.schema.run import RunConfig


class JudgeConfig(Section):
    """Who scores responses: reward functions (summed by weight), or a reward model."""

    reward: Annotated[OneOrMore[RewardConfig], Field(examples=[{"fn": "math"}])] = []
    reward_model: Annotated[str, InputPath("directory")] | None = None
    """A Hugging Face directory with a reward head; it reads with its own tokenizer."""
    reward_template: str = "auto"
    """The reward model's chat template: `auto`: its tokenizer's; `none`; or a Jinja template, or a file that holds
    one."""
    reward_tokens: PositiveInt = 16384
    """Token budget of one forward of the reward model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Models compute in this type, on …"""
    device: str = "cpu"
    """… this device: `cpu`, `cuda`, `cuda:1`."""

    @model_validator(mode="after")
    def _one_judge(self) -> Self:
        if self.reward and self.reward_model:
            raise Conflict(("reward_model",), "there is a `reward` as well; scores come from one of them")
        return self

    @model_validator(mode="after")
    def _rewards_are_functions(self) -> Self:
        check_rewards(self.reward)
        for index, reward in enumerate(self.reward):
            if reward.model:
                raise Conflict(("reward", index, "model"), "names a model of a run; give the directory: `reward_model`")
            if reward.normalise != "none":
                raise Conflict(("reward", index, "normalise"), "has no effect here; scores are kept as they are")
        return self


class GenerateConfig(JudgeConfig):
    """Responses of a model to prompts; with a reward function or model they are scored, too."""

    model: Annotated[str, InputPath("directory")] | None = None
    """A Hugging Face model directory; None: the pipeline's current model."""
    data: DataConfig = DataConfig()
    """`train` holds the prompts; they are drawn in the order of a training run, or of the file without `shuffle`."""
    prompts: PositiveInt | None = None
    """How many of them, other ones in each round; None: as many as there are."""
    samples: PositiveInt = 1
    """Responses for each prompt."""
    keep: Literal["all", "best"] = "all"
    """`best`: of the responses to a prompt only the one with the highest score."""
    sampling: SamplingConfig = SamplingConfig()
    seed: NonNegativeInt = 0
    native: ResultNeutral[NativeConfig] = NativeConfig()

    @model_validator(mode="after")
    def _the_best_is_scored(self) -> Self:
        if self.keep == "best" and not (self.reward or self.reward_model):
            raise Conflict(("keep",), "is 'best', and nothing scores the responses: give `reward` or `reward_model`")
        return self


class ScoreConfig(JudgeConfig):
    """Scores for responses in a file, one row after the other: {prompt or messages, response}, {messages} that end with
    an answer, or {prompt, chosen, rejected}."""

    shorthand = "reward"

    data: DataConfig = DataConfig()
    """`train` is the file (none: what the stage before has written); the keys say what its rows hold."""
    response_key: str = "response"

    @model_validator(mode="after")
    def _there_is_a_judge(self) -> Self:
        if not self.reward and not self.reward_model:
            raise Conflict((), "nothing to score with: give `reward` (functions) or `reward_model` (a directory)")
        return self


class SelectConfig(Section):
    """What of the scored responses is learnt from. Responses without a score are dropped, and counted."""

    shorthand = "keep"

    keep: Literal["best", "threshold", "all", "best_worst", "labelled"]
    """As conversations, for SFT: `best`, of each prompt's responses the one with the highest score; `threshold`, every
    one that reaches the threshold; `all`. As pairs, for DPO: `best_worst`, the highest against the lowest. For KTO:
    `labelled`, every one, with whether it reaches the threshold."""
    data: Annotated[OneOrMore[Annotated[str, InputPath("file")]], Field(examples=["scored.jsonl"])] = []
    """Files with scored responses; none: what the stage before has written."""
    threshold: float | None = None
    """The lowest score of a response that is learnt (of a pair: of the chosen one)."""
    truncated: Literal["drop", "keep"] = "drop"
    """Responses that reached max_new_tokens: as conversations they would end in the middle of a sentence."""
    min_margin: NonNegativeFloat = 0.0
    """Pairs whose scores differ by less are dropped. Equal scores are no pair in any case."""

    @model_validator(mode="after")
    def _settings_fit(self) -> Self:
        if self.keep in ("threshold", "labelled") and self.threshold is None:
            raise Conflict(("threshold",), f"missing: keep `{self.keep}` needs it")
        if self.keep == "all" and self.threshold is not None:
            raise Conflict(("threshold",), "has no effect with keep `all`; use `threshold`")
        if self.keep != "best_worst" and self.min_margin:
            raise Conflict(("min_margin",), f"has no effect with keep `{self.keep}`; use `best_worst`")
        return self


class StageConfig(Section):
    """One stage: one of `generate`, `score`, `select` and `train`, with its settings."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z]\w*$")] | None = None
    """Of its folder, and for `${stages.NAME.output}`; None: the kind."""
    generate: dict[str, Any] | None = None
    """See GenerateConfig; likewise below."""
    score: dict[str, Any] | None = None
    select: dict[str, Any] | None = None
    train: dict[str, Any] | None = None
    """A run's YAML (its `output` becomes the folder of the stage), or the path of one; `include` puts files beneath."""

    @property
    def kind(self) -> str:
        return next(kind for kind in STAGES if getattr(self, kind) is not None)

    @property
    def called(self) -> str:
        return self.name or self.kind

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> Self:
        given = [kind for kind in STAGES if getattr(self, kind) is not None]
        if len(given) != 1:
            found = " and ".join(f"`{kind}`" for kind in given) or "nothing to do"
            raise ValueError(f"has {found}; a stage is one of {' | '.join(STAGES)}")
        return self


class PipelineConfig(Section):
    """Stages, and how often they are repeated. References: `${model}` (the current model's directory: what the newest
    `train` stage made, at first `model`), `${round}` (from 1), `${stages.NAME.output}` (of this round)."""

    output: str = "runs/pipeline"
    """The folder: `round_K/NN_NAME/` for each stage."""
    model: Annotated[str, InputPath("directory")] | None = None
    """The model that the first round begins with."""
    rounds: PositiveInt = 1
    stages: Annotated[list[StageConfig], Field(min_length=1)]

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [stage.called for stage in self.stages]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise Conflict(("stages", index), f"a second stage is called '{name}'; give it a `name`")
        return self


STAGES = {"generate": GenerateConfig, "score": ScoreConfig, "select": SelectConfig, "train": RunConfig}


class ServeConfig(JudgeConfig):
    """A reward server: who scores, where it listens, and how much it takes."""

    host: str = "127.0.0.1"
    """`0.0.0.0` lets other machines in as well; set `api_key_env` then."""
    port: Annotated[int, Field(ge=0, le=65535)] = 5000
    """0: one that is free."""
    api_key_env: str | None = None
    """Environment variable with a key; requests then need `Authorization: Bearer <key>`."""
    label_key: str = "answer"
    """The row's key under which reward functions find a request's `labels`."""
    strip: list[str] = []
    """Texts at the end of a `query` that do not belong to the response: `<|im_end|>`, as OpenRLHF sends it."""
    batch_size: PositiveInt = 64
    """Responses, of whatever requests, that are scored together."""
    queue: PositiveInt = 4096
    """Responses that may wait; requests beyond them are turned away (429) and may come back."""
    max_bytes: PositiveInt = 64 * 2**20
    """Of a request's body."""
    grace: PositiveFloat = 30.0
    """Seconds that requests under way get to finish when the server is told to stop."""

    @model_validator(mode="after")
    def _there_is_a_judge(self) -> Self:
        if not self.reward and not self.reward_model:
            raise Conflict((), "nothing to serve: give `reward` (functions) or `reward_model` (a directory)")
        return self
