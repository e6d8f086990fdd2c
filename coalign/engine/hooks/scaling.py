"""`coalign scale`: a running model gets more processes or fewer, between two steps.

The command writes what it asks for into the run folder; the run reads it after each step and answers in another file.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from coalign.cluster.future import WorkerError
from coalign.engine.engine import Hook
from coalign.engine.hooks.recovery import Recovery
from coalign.files import read_json_object, write_text_atomically
from coalign.types import Stats

if TYPE_CHECKING:
    from coalign.cluster.future import BatchRef
    from coalign.engine.engine import Engine

log = logging.getLogger(__name__)


def write_request(run: Path, processes: Mapping[str, int]) -> None:
    """Ask a run for these numbers of processes, by model. Replaces a request that the run has not read."""
    _find_answer(run).unlink(missing_ok=True)
    write_text_atomically(_find_request(run), json.dumps(dict(processes)))


def read_answer(run: Path) -> dict[str, str] | None:
    """Return what the run says of each model that it was asked about; None: it has not answered yet."""
    answer = _find_answer(run)
    return None if _find_request(run).exists() or not answer.exists() else read_json_object(answer)


def _find_request(run: Path) -> Path:
    return run / "scale.json"


def _find_answer(run: Path) -> Path:
    return run / "scale.answer.json"


class Scaling(Hook):
    """Changes the numbers of processes as the run was asked to. What is refused changes nothing."""

    def __init__(self, run: Path, recovery: Recovery) -> None:
        self.run = run
        self.recovery = recovery

    def after_step(self, engine: Engine, stats: Stats, batch: BatchRef) -> None:
        if not (request := _find_request(self.run)).exists():
            return
        engine.phase("restart")
        answers = {}
        for name, processes in read_json_object(request).items():
            try:
                self._scale(engine, name, processes)
                answers[name] = f"{processes} processes since step {engine.step}"
            except (ValueError, OSError) as problem:
                answers[name] = f"refused: {problem}"
            except WorkerError as problem:  # new replicas could not load the model
                if name in engine.learning:
                    raise
                answers[name] = f"refused: {problem}"
            log.warning("scale: %s: %s", name, answers[name])
        write_text_atomically(_find_answer(self.run), json.dumps(answers))
        request.unlink()
        engine.phase("hooks")

    def _scale(self, engine: Engine, name: str, processes: int) -> None:
        """Raises ValueError for what cannot be, and OSError if a training state finds no place in memory."""
        if name not in engine.running:
            raise ValueError(f"there is no model of that name; there are {', '.join(engine.running)}")
        engine.training.finish()
        if name in engine.learning:
            saved = self.recovery.save_now(engine)
            engine.cluster.resize(name, processes)
            engine.running[name].load(str(saved / "models" / name)).result()
        else:
            engine.cluster.resize(name, processes)
        engine.training.reconnect()
        engine.training.sync(engine.step)
