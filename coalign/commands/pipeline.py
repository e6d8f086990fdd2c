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

from coalign.commands.resumable import JsonRecord, fingerprint_settings
from coalign.commands.stages import STAGE_TYPES, trains_a_policy
from coalign.config.pipelines import PipelineFile
from coalign.config.schema import Section
from coalign.engine.hooks.run_folder import lock_folder
from coalign.files import move_aside, write_text_atomically
from coalign.launch.plan import find_recipe
from coalign.report.display import Display
from coalign.report.step_line import format_number


@dataclass(frozen=True)
class PlannedStage:
    """A stage of one round, with its complete settings."""

    round: int
    name: str
    kind: str
    folder: Path
    settings: Section

    @property
    def output(self) -> Path:
        return self.folder / STAGE_TYPES[self.kind].output

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
                settings = STAGE_TYPES[given.kind].complete(settings, stages[-1].output if index else None, model)
                STAGE_TYPES[given.kind].check(settings)
            folder = Path(header.output) / f"round_{round}" / f"{index + 1:02d}_{given.called}"
            stages.append(stage := PlannedStage(round, given.called, given.kind, folder, settings))
            outputs[stage.name] = {"output": str(stage.output)}
            made.add(str(stage.output))
            if given.kind == "train" and trains_a_policy(settings):
                model = str(stage.output)
    return stages


def run_pipeline(file: PipelineFile, display: Display) -> int:
    """Run the stages that are not done yet; return the exit code (0, or that of a training run that was ended)."""
    stages = plan_stages(file)
    with lock_folder(Path(file.header.output)):
        for stage in stages:
            if code := _run_stage(stage, display):
                return code
    display.show(f"results in {file.header.output}")
    return 0


def check_pipeline(file: PipelineFile, display: Display) -> None:
    """Print what the pipeline would do. Raises ConfigError for what would stop it."""
    for stage in plan_stages(file):
        STAGE_TYPES[stage.kind].try_out(stage.settings)
        done = " (done)" if _read(stage.folder / "stage.json").get("done") else ""
        display.show(f"{stage}: {STAGE_TYPES[stage.kind].describe(stage.settings)}{done}\n    → {stage.output}")
    display.show("\nno problem found")


def _run_stage(stage: PlannedStage, display: Display) -> int:
    """Run a stage unless it is done, continuing an interrupted one; return its exit code."""
    record = stage.folder / "stage.json"
    before, depends = _read(record), fingerprint_settings(stage.settings)
    if before and before["depends"] != depends:
        changed = [key for key in {**before["depends"], **depends} if before["depends"].get(key) != depends.get(key)]
        moved = move_aside(stage.folder)
        display.note(f"{stage} is done anew: {', '.join(changed)} changed; what was there is now in {moved}")
        before = {}
    if before.get("done") and stage.output.exists():
        display.show(f"{stage}: done before ({_format_counts(before['counts'])})")
        return 0
    seconds = before.get("seconds", 0.0)
    now = {"name": stage.name, "kind": stage.kind, "round": stage.round, "output": str(stage.output), "done": False}
    _write(record, now | {"seconds": seconds, "depends": depends})
    display.show(f"{stage}: {'goes on' if before else 'begins'}")
    begun = time.monotonic()
    counts, code = STAGE_TYPES[stage.kind].run(stage.settings, stage.folder, stage.round, display)
    gc.collect()  # free the stage's models before the next one loads its own, maybe in another process
    torch.cuda.empty_cache()
    now |= {"done": not code, "counts": counts, "seconds": round(seconds + time.monotonic() - begun, 3)}
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
    return ", ".join(f"{name} {format_number(value)}" for name, value in counts.items())
