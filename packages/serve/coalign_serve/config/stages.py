"""Pipelines of stages that repeat in rounds, and their stages' settings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from coalign.config.errors import Conflict
from coalign.config.schema.data import DataConfig
from coalign.config.schema.generator import NativeConfig, SamplingConfig, TransformersConfig
from coalign.config.schema.model import ScoreAt
from coalign.config.schema.run_config import RunConfig
from coalign.config.schema.section import (
    InputPath,
    OneOrMore,
    OutputPath,
    ResultNeutral,
    RewardConfig,
    Section,
    check_rewards,
)


class JudgeConfig(Section):
    """What scores responses: reward functions (summed by weight) or a reward model."""

    reward: Annotated[OneOrMore[RewardConfig], Field(examples=[{"fn": "math"}])] = []
    reward_model: Annotated[str, InputPath("model")] | None = None
    """A Hugging Face directory with a reward head, or a run folder; the model uses its own tokenizer."""
    reward_template: str | None = None
    """The reward model's chat template: `auto` (its tokenizer's), `none`, a Jinja template or a file that holds one.
    None: what the run was trained with that made the model, else `auto`."""
    reward_score_at: ScoreAt | None = None
    """The token at which the reward model's score is read: see `score_at` of a model."""
    reward_tokens: PositiveInt = 16384
    """Token limit of one forward pass of the reward model."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type that models compute in. `auto`: bfloat16 for a model that is stored in 16 bits a number or fewer, if
    the device multiplies that; else float32."""
    device: str = "auto"
    """Device that models run on: `cpu`, `cuda`, `cuda:1`; `auto`: the machine's accelerator, or else `cpu`."""

    def check(self) -> None:
        if self.reward and self.reward_model:
            raise Conflict(("reward_model",), "there is a `reward` as well; scores come from one of them")
        check_rewards(self.reward)
        for index, reward in enumerate(self.reward):
            if reward.model:
                raise Conflict(("reward", index, "model"), "names a model of a run; give the directory: `reward_model`")
            if reward.normalise != "none":
                raise Conflict(("reward", index, "normalise"), "has no effect here; scores are kept as they are")
            if reward.max_bugs != RewardConfig.model_fields["max_bugs"].default:
                raise Conflict(("reward", index, "max_bugs"), "is for runs; here a response without a score is counted")
            if reward.sources:
                raise Conflict(("reward", index, "sources"), "is for runs; here every response gets every part")


class GenerateConfig(JudgeConfig):
    """Generates a model's responses to prompts; scores them if a reward function or model is given."""

    model: Annotated[str, InputPath("model")] | None = None
    """A Hugging Face model directory, or a run folder; None: the pipeline's current model."""
    data: DataConfig = DataConfig()
    """`train` holds the prompts, drawn in the order of a training run, or in file order without `shuffle`."""
    prompts: PositiveInt | None = None
    """Number of prompts, different ones in each round; None: all."""
    samples: PositiveInt = 1
    """Responses for each prompt."""
    keep: Literal["all", "best"] = "all"
    """`best`: only the response with the highest score of each prompt."""
    sampling: SamplingConfig = SamplingConfig()
    seed: NonNegativeInt = 0
    module: Literal["native", "transformers"] = "native"
    """The generator; `transformers` for architectures that `native` refuses."""
    native: ResultNeutral[NativeConfig] = NativeConfig()
    transformers: ResultNeutral[TransformersConfig] = TransformersConfig()

    def check(self) -> None:
        super().check()
        if self.keep == "best" and not (self.reward or self.reward_model):
            raise Conflict(("keep",), "is 'best', and nothing scores the responses: give `reward` or `reward_model`")


class ScoreConfig(JudgeConfig):
    """Scores the responses in a file. Rows are {prompt or messages, response}, {messages} that end with an answer, or
    {prompt, chosen, rejected}."""

    shorthand = "reward"

    data: DataConfig = DataConfig()
    """`train` is the file (none: the output of the previous stage); the keys describe its rows."""
    response_key: str = "response"

    def check(self) -> None:
        super().check()
        if not self.reward and not self.reward_model:
            raise Conflict((), "nothing to score with: give `reward` (functions) or `reward_model` (a directory)")


class SelectConfig(Section):
    """Selects the scored responses to train on. Responses without a score are dropped and counted."""

    shorthand = "keep"

    keep: Literal["best", "threshold", "all", "best_worst", "labelled"]
    """Conversations for SFT: `best`, the response with the highest score of each prompt; `threshold`, all that reach
    the threshold; `all`. Pairs for DPO: `best_worst`, the highest against the lowest score. For KTO: `labelled`, all
    responses, labelled by whether they reach the threshold."""
    data: Annotated[OneOrMore[Annotated[str, InputPath("data")]], Field(examples=["scored.jsonl"])] = []
    """Files with scored responses; none: the output of the previous stage."""
    threshold: float | None = None
    """Minimum score of a response to learn (in a pair: of the chosen one)."""
    truncated: Literal["drop", "keep"] = "drop"
    """Whether to use responses that reached max_new_tokens, which end in the middle of a sentence."""
    min_margin: NonNegativeFloat = 0.0
    """Pairs whose scores differ by less are dropped; equal scores never form a pair."""

    def check(self) -> None:
        if self.keep in ("threshold", "labelled") and self.threshold is None:
            raise Conflict(("threshold",), f"missing: keep `{self.keep}` needs it")
        if self.keep == "all" and self.threshold is not None:
            raise Conflict(("threshold",), "has no effect with keep `all`; use `threshold`")
        if self.keep != "best_worst" and self.min_margin:
            raise Conflict(("min_margin",), f"has no effect with keep `{self.keep}`; use `best_worst`")


class StageConfig(Section):
    """One stage: one of `generate`, `score`, `select` and `train`, with its settings."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z]\w*$")] | None = None
    """Name of its folder, and in `${stages.NAME.output}`; None: `generate`, `score`, `select` or `train`."""
    generate: dict[str, Any] | None = None
    """Settings of this stage: see GenerateConfig. Likewise `score` (ScoreConfig) and `select` (SelectConfig)."""
    score: dict[str, Any] | None = None
    select: dict[str, Any] | None = None
    train: dict[str, Any] | None = None
    """A run's YAML (its `output` becomes the folder of the stage), or the path of one; `include` adds files beneath."""

    @property
    def task(self) -> str:
        return next(name for name in STAGES if getattr(self, name) is not None)

    @property
    def called(self) -> str:
        return self.name or self.task

    def check(self) -> None:
        given = [name for name in STAGES if getattr(self, name) is not None]
        if len(given) != 1:
            tasks = " and ".join(f"`{name}`" for name in given) or "nothing to do"
            raise ValueError(f"has {tasks}; a stage is one of {' | '.join(STAGES)}")


class PipelineConfig(Section):
    """Stages that run in order, repeated in rounds.

    References: `${model}` (directory of the current model: the result of the newest `train` stage, at first `model`),
    `${round}` (from 1), `${stages.NAME.output}` (of this round).
    """

    output: Annotated[str, OutputPath()] = "runs/pipeline"
    """The folder of the pipeline, with `round_K/NN_NAME/` for each stage."""
    model: Annotated[str, InputPath("model")] | None = None
    """The model of the first round."""
    rounds: PositiveInt = 1
    stages: Annotated[list[StageConfig], Field(min_length=1)]

    def check(self) -> None:
        names = [stage.called for stage in self.stages]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise Conflict(("stages", index), f"a second stage is called '{name}'; give it a `name`")


STAGES = {"generate": GenerateConfig, "score": ScoreConfig, "select": SelectConfig, "train": RunConfig}
