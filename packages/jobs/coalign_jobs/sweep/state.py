"""What became of the trials of a sweep, in the files of its folder: sweep.json, reports.jsonl."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from coalign.engine.hooks.run_folder import StepLog
from coalign.files import read_json_object, write_text_atomically
from coalign_jobs.sweep.config import SweepConfig
from coalign_jobs.sweep.space import name_trial

Status = Literal["waiting", "running", "finished", "stopped", "failed"]
FILE = "sweep.json"
NEUTRAL = {"concurrent", "output"}  # settings of a sweep that may change when it goes on


@dataclass
class SweepTrial:
    """A trial: its settings, and what became of it.

    waiting: it has not begun, or was interrupted. stopped: the scheduler has ended it early. failed: see ``error``.
    """

    number: int
    settings: dict[str, Any]
    status: Status = "waiting"
    step: int = 0
    value: float | None = None  # the last value of the sweep's metric
    error: str = ""
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return name_trial(self.number, self.settings)


@dataclass
class SweepState:
    """The trials of a sweep. ``save`` after a change."""

    folder: Path
    definition: dict[str, Any]  # what decides its trials and their results
    trials: list[SweepTrial] = field(default_factory=list)

    @classmethod
    def create(cls, config: SweepConfig, base: str, settings: Sequence[Mapping[str, Any]]) -> SweepState:
        """A sweep that has not begun. ``base``: the text of the run's configuration."""
        definition = {**config.model_dump(mode="json", exclude=NEUTRAL), "base": base}
        trials = [SweepTrial(number, dict(values)) for number, values in enumerate(settings)]
        return cls(Path(config.output), definition, trials)

    @property
    def reports(self) -> StepLog:
        return StepLog(self.folder / "reports.jsonl")

    def exists(self) -> bool:
        """Whether there is a sweep in the folder."""
        return (self.folder / FILE).exists()

    def save(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        content = {"sweep": self.definition, "trials": [asdict(trial) for trial in self.trials]}
        write_text_atomically(self.folder / FILE, json.dumps(content, indent=1, ensure_ascii=False) + "\n")

    def load(self) -> None:
        """Take over what became of the trials so far; those that were running wait again, and so do failed ones.

        Raises ValueError if the sweep in the folder is another one, with what has changed.
        """
        content = read_json_object(self.folder / FILE)
        saved = content["sweep"]
        if changed := [key for key in {**saved, **self.definition} if saved.get(key) != self.definition.get(key)]:
            raise ValueError(
                f"{self.folder} holds another sweep: {', '.join(_describe(key, saved) for key in changed)} changed. "
                "Restore the file, or give another `output`"
            )
        self.trials = [SweepTrial(**trial) for trial in content["trials"]]
        for trial in self.trials:
            if trial.status in ("running", "failed"):
                trial.status, trial.error = "waiting", ""

    def list_reports(self) -> Iterator[tuple[SweepTrial, int, float]]:
        """Yield the reports of all trials in the order in which they came: (trial, step, value)."""
        path = self.folder / "reports.jsonl"
        if path.exists():
            with open(path, "rb") as lines:
                for line in lines:
                    record = json.loads(line)
                    yield self.trials[record["trial"]], record["step"], record["value"]


def _describe(key: str, saved: Mapping[str, Any]) -> str:
    if key == "base":
        return "the base configuration"
    return f"`{key}` (it was {json.dumps(saved.get(key), ensure_ascii=False)})"
