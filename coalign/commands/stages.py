"""The types of pipeline stages: what each takes from earlier stages, how it is checked, and what it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from coalign.backends.objective import Objective
from coalign.commands.generate import generate
from coalign.commands.score import score
from coalign.commands.select import select
from coalign.config.errors import Conflict
from coalign.config.functions import bind, resolve
from coalign.config.schema import (
    GenerateConfig,
    JudgeConfig,
    RunConfig,
    ScoreConfig,
    Section,
    SelectConfig,
    SourceConfig,
)
from coalign.launch.check import trace
from coalign.launch.plan import find_recipe, prepare
from coalign.launch.run import train
from coalign.report.display import Display
from coalign.roles import Trainable

Settings = TypeVar("Settings", bound=Section)
StageResult = tuple[dict[str, float], int]  # counts, exit code


class StageType(ABC, Generic[Settings]):
    """One type of stage. ``output`` is the name of its result in the stage's folder."""

    output: ClassVar[str]

    def complete(self, settings: Settings, before: Path | None, model: str | None) -> Settings:
        """Return the settings, completed by the output of the stage ``before`` and the current ``model``.

        Raises Conflict for what is still missing.
        """
        return settings

    def check(self, settings: Settings) -> None:
        """Raise ValueError for what the schema cannot check: reward functions and their arguments."""
        if isinstance(settings, JudgeConfig):
            for i, reward in enumerate(settings.reward):
                assert reward.fn is not None  # the schema refuses models of a run here
                bind(resolve(reward.fn, "coalign.rewards"), reward.arguments, f"reward.{i}")

    def try_out(self, settings: Settings) -> None:
        """Raise ValueError for what takes some seconds to check (`coalign check`)."""

    @abstractmethod
    def describe(self, settings: Settings) -> str:
        """Describe in a line what the stage will do."""

    @abstractmethod
    def run(self, settings: Settings, folder: Path, round: int, display: Display) -> StageResult:
        """Write the output, or the rest of it after an interruption."""


class GenerateStage(StageType[GenerateConfig]):
    output = "responses.jsonl"

    def complete(self, settings: GenerateConfig, before: Path | None, model: str | None) -> GenerateConfig:
        if not settings.data.train:
            raise Conflict(("data", "train"), "missing: a file of prompts")
        if not (settings.model or model):
            raise Conflict(("model",), "missing: give the pipeline's `model`, or one here")
        return settings.model_copy(update={"model": settings.model or model})

    def describe(self, settings: GenerateConfig) -> str:
        return f"{settings.samples} responses of {settings.model} to {settings.prompts or 'all'} prompts"

    def run(self, settings: GenerateConfig, folder: Path, round: int, display: Display) -> StageResult:
        return generate(settings, folder / self.output, display, round=round), 0


class ScoreStage(StageType[ScoreConfig]):
    output = "scored.jsonl"

    def complete(self, settings: ScoreConfig, before: Path | None, model: str | None) -> ScoreConfig:
        if settings.data.train:
            return settings
        source = SourceConfig(path=_path(before, ("data", "train")))
        return settings.model_copy(update={"data": settings.data.model_copy(update={"train": [source]})})

    def describe(self, settings: ScoreConfig) -> str:
        return f"by {', '.join(reward.fn for reward in settings.reward if reward.fn) or settings.reward_model}"

    def run(self, settings: ScoreConfig, folder: Path, round: int, display: Display) -> StageResult:
        return score(settings, folder / self.output, display), 0


class SelectStage(StageType[SelectConfig]):
    output = "selected.jsonl"

    def complete(self, settings: SelectConfig, before: Path | None, model: str | None) -> SelectConfig:
        if settings.data:
            return settings
        return settings.model_copy(update={"data": [_path(before, ("data",))]})

    def describe(self, settings: SelectConfig) -> str:
        return f"keep {settings.keep}"

    def run(self, settings: SelectConfig, folder: Path, round: int, display: Display) -> StageResult:
        return select(settings, folder / self.output), 0


class TrainStage(StageType[RunConfig]):
    """The stage's folder is the run's; the output is its link to the newest checkpoint's model, or the best one's."""

    output = "model"

    def check(self, settings: RunConfig) -> None:
        prepare(settings)

    def try_out(self, settings: RunConfig) -> None:
        trace(prepare(settings))

    def describe(self, settings: RunConfig) -> str:
        return settings.algorithm

    def run(self, settings: RunConfig, folder: Path, round: int, display: Display) -> StageResult:
        config = settings.model_copy(update={"output": str(folder)})
        if code := train(config, Display(quiet=display.quiet, out=display.out, err=display.err)):
            return {}, code
        checkpoint = (folder / self.output).resolve().parent
        return {"step": int(checkpoint.name.removeprefix("step_"))}, 0


STAGE_TYPES: dict[str, StageType] = {
    "generate": GenerateStage(),
    "score": ScoreStage(),
    "select": SelectStage(),
    "train": TrainStage(),
}


def trains_a_policy(config: RunConfig) -> bool:
    """Tell whether a run's main model is a language model, which then becomes the pipeline's current model."""
    loss = Objective.of(config.loss, "loss") if config.loss else None
    roles = find_recipe(config.algorithm).roles(config, loss)
    main = next(name for name, role in roles.items() if role is Trainable)
    return config.models[main].head == "lm"


def _path(before: Path | None, key: tuple[str, ...]) -> str:
    if before is None:
        raise Conflict(key, "missing: no stage comes before, so say which file")
    return str(before)
