"""`coalign pipeline`: runs stages in order, round after round; finished stages are not run again.

``<output>/round_K/NN_NAME/`` holds a stage's output and ``stage.json``: what it depends on (settings, and the contents
of every file and model that they name), whether it is done, its counts and seconds. A stage whose dependencies have
changed since it was done runs again, and so does whatever depends on its output. The old folder is renamed, never
deleted.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from coalign.backends.scorers.reward_functions import check_reward_lengths
from coalign.config.errors import Conflict
from coalign.config.functions import bind, resolve
from coalign.config.schema import RunConfig, Section, SourceConfig
from coalign.files import move_aside, write_text_atomically
from coalign.launch.fetch import fetch_sources
from coalign.launch.plan import find_recipe, outline_run, prepare
from coalign.launch.run import train
from coalign.launch.trace import trace
from coalign.report.display import Display
from coalign.report.step_line import format_metric
from coalign.roles import Trainable
from coalign.run_files.lock import lock_folder
from coalign_serve.config.pipeline_file import PipelineFile
from coalign_serve.config.stages import GenerateConfig, JudgeConfig, ScoreConfig, SelectConfig
from coalign_serve.generate import generate
from coalign_serve.judges import choose_device
from coalign_serve.resumable import JsonRecord, fingerprint_settings
from coalign_serve.score import score
from coalign_serve.select import select

# The name of a stage's result in its folder, by the stage's task. A train stage's folder is the run's; the result is
# its link to the newest checkpoint's model, or the best one's.
OUTPUTS = {"generate": "responses.jsonl", "score": "scored.jsonl", "select": "selected.jsonl", "train": "model"}


def complete_settings(settings: Section, previous: Path | None, model: str | None) -> Section:
    """Complete a stage's settings by the output of the ``previous`` stage and the current ``model``.

    Raises Conflict for what is still missing, and for copies of checkpoints.
    """
    if isinstance(settings, GenerateConfig):
        if not settings.data.train:
            raise Conflict(("data", "train"), "missing: a file of prompts")
        if not (settings.model or model):
            raise Conflict(("model",), "missing: give the pipeline's `model`, or one here")
        return settings.model_copy(update={"model": settings.model or model})
    if isinstance(settings, ScoreConfig) and not settings.data.train:
        source = SourceConfig(path=_path(previous, ("data", "train")))
        return settings.model_copy(update={"data": settings.data.model_copy(update={"train": [source]})})
    if isinstance(settings, SelectConfig) and not settings.data:
        return settings.model_copy(update={"data": [_path(previous, ("data",))]})
    if isinstance(settings, RunConfig) and settings.runtime.save_copies_to:
        raise Conflict(
            ("runtime", "save_copies_to"),
            "is not for stages: one that runs again would continue from copies of what it replaces; leave it out",
        )
    return settings


def check_settings(settings: Section) -> None:
    """Raise ValueError for what the schema cannot check: a run's plan, reward functions and their arguments."""
    if isinstance(settings, RunConfig):
        prepare(fetch_sources(settings, weights=False, rows=False), join=False)
    elif isinstance(settings, JudgeConfig):
        for i, reward in enumerate(settings.reward):
            assert reward.fn is not None  # the schema refuses models of a run here
            bind(resolve(reward.fn, reward.home), reward.arguments, f"reward.{i}")
        choose_device(settings.device)
        if isinstance(settings, GenerateConfig):
            check_reward_lengths(settings.reward, settings.sampling.max_new_tokens, "sampling.max_new_tokens")


def describe_settings(settings: Section) -> str:
    """Describe in a line what the stage will do."""
    match settings:
        case GenerateConfig():
            return f"{settings.samples} responses of {settings.model} to {settings.prompts or 'all'} prompts"
        case ScoreConfig():
            return f"by {', '.join(reward.fn for reward in settings.reward if reward.fn) or settings.reward_model}"
        case SelectConfig():
            return f"keep {settings.keep}"
        case RunConfig():
            return settings.algorithm
    raise TypeError(type(settings))


def run_stage(stage: PlannedStage, display: Display) -> tuple[dict[str, float], int]:
    """Write the output, or the rest of it after an interruption; return counts and an exit code."""
    match stage.settings:
        case GenerateConfig() as settings:
            return generate(settings, stage.output, display, round=stage.round, overwrite=True), 0
        case ScoreConfig() as settings:
            return score(settings, stage.output, display, overwrite=True), 0
        case SelectConfig() as settings:
            return select(settings, stage.output), 0
        case RunConfig() as settings:
            config = settings.model_copy(update={"output": str(stage.folder)})
            if code := train(config, Display(quiet=display.quiet, out=display.out, err=display.err)):
                return {}, code
            checkpoint = stage.output.resolve().parent
            return {"step": int(checkpoint.name.removeprefix("step_"))}, 0
    raise TypeError(type(stage.settings))


def trains_a_policy(config: RunConfig) -> bool:
    """Tell whether a run's main model is a language model, which then becomes the pipeline's current model."""
    main = next(name for name, role in outline_run(config).roles.items() if role is Trainable)
    return config.models[main].head == "lm"


def _path(previous: Path | None, key: tuple[str, ...]) -> str:
    if previous is None:
        raise Conflict(key, "missing: no stage comes before, so say which file")
    return str(previous)


@dataclass(frozen=True)
class PlannedStage:
    """A stage of one round, with its complete settings."""

    round: int
    name: str
    task: str
    folder: Path
    settings: Section

    @property
    def output(self) -> Path:
        return self.folder / OUTPUTS[self.task]

    def __str__(self) -> str:
        return f"round {self.round} {self.name}"


def plan_stages(file: PipelineFile) -> list[PlannedStage]:
    """List the stages of all rounds, with validated settings. Raises ConfigError with every problem of a stage."""
    header, stages, made = file.header, [], set()
    model = header.model
    for round in range(1, header.rounds + 1):
        outputs: JsonRecord = {}
        for index, given in enumerate(header.stages):
            names = {"output": header.output, "round": round, "model": model, "stages": outputs}
            settings = file.settings(index, names, made, lambda algorithm: find_recipe(algorithm).defaults)
            with file.located(index):
                settings = complete_settings(settings, stages[-1].output if index else None, model)
                check_settings(settings)
            folder = Path(header.output) / f"round_{round}" / f"{index + 1:02d}_{given.called}"
            stages.append(stage := PlannedStage(round, given.called, given.task, folder, settings))
            outputs[stage.name] = {"output": str(stage.output)}
            made.add(str(stage.output))
            if isinstance(settings, RunConfig) and trains_a_policy(settings):
                model = str(stage.output)
    return stages


def run_pipeline(file: PipelineFile, display: Display) -> int:
    """Run the stages that are not done yet; return the exit code (0, or that of a training run that was ended)."""
    stages = plan_stages(file)
    with lock_folder(Path(file.header.output)):
        for stage in stages:
            if code := _run_unless_done(stage, display):
                return code
    display.show(f"results in {file.header.output}")
    return 0


def check_pipeline(file: PipelineFile, display: Display) -> None:
    """Print what the pipeline would do. Raises ConfigError for what would stop it."""
    for stage in plan_stages(file):
        if isinstance(stage.settings, RunConfig):
            trace(prepare(fetch_sources(stage.settings, weights=False, rows=False), join=False))
        done = " (done)" if _read(stage.folder / "stage.json").get("done") else ""
        display.show(f"{stage}: {describe_settings(stage.settings)}{done}\n    → {stage.output}")
    display.show("\nno problem found")


def _run_unless_done(stage: PlannedStage, display: Display) -> int:
    """Run a stage unless it is done, continuing an interrupted one; return its exit code."""
    record = stage.folder / "stage.json"
    recorded, depends = _read(record), fingerprint_settings(stage.settings)
    if recorded and (old := recorded["depends"]) != depends:
        changed = [key for key in {**old, **depends} if old.get(key) != depends.get(key)]
        moved = move_aside(stage.folder)
        display.note(f"{stage} is done anew: {', '.join(changed)} changed; what was there is now in {moved}")
        recorded = {}
    if recorded.get("done") and stage.output.exists():
        display.show(f"{stage}: done before ({_format_counts(recorded['counts'])})")
        return 0
    seconds = recorded.get("seconds", 0.0)
    now = {"name": stage.name, "kind": stage.task, "round": stage.round, "output": str(stage.output), "done": False}
    _write(record, now | {"seconds": seconds, "depends": depends})
    display.show(f"{stage}: {'goes on' if recorded else 'begins'}")
    started_at = time.monotonic()
    counts, code = run_stage(stage, display)
    gc.collect()  # free the stage's models before the next one loads its own, maybe in another process
    if torch.accelerator.is_available():
        torch.accelerator.memory.empty_cache()
    now |= {"done": not code, "counts": counts, "seconds": round(seconds + time.monotonic() - started_at, 3)}
    _write(record, now | {"depends": depends})
    if not code:
        display.show(f"{stage}: {_format_counts(counts)}; {now['seconds']:.1f} s")
    return code


def _read(record: Path) -> JsonRecord:
    return json.loads(record.read_text()) if record.exists() else {}


def _write(record: Path, state: JsonRecord) -> None:
    record.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(record, json.dumps(state, indent=1) + "\n")


def _format_counts(counts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {format_metric(counts, name)}" for name in counts)
