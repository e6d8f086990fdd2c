"""Keeps a run's journal: opens it, lets it listen to the Environment, and notes steps, syncs and restarts."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from coalign.engine.engine import Hook
from coalign.engine.hooks.provenance import Provenance
from coalign.engine.hooks.run_folder import replace_non_finite
from coalign.engine.rollouts.finished_rollouts import FOLDER, FinishedRollouts
from coalign.engine.rollouts.journal import Journal, read_lines
from coalign.files import move_aside
from coalign.types import Stats

if TYPE_CHECKING:
    from coalign.cluster.batch_ref import BatchRef
    from coalign.engine.engine import Engine

log = logging.getLogger(__name__)


class JournalHook(Hook):
    """Writes the journal of a run with rollouts into ``path``; see coalign.engine.rollouts.journal.

    The finished rollouts since the newest checkpoint are kept beside it (coalign.engine.rollouts.finished_rollouts);
    ``list_saved`` returns the steps that have one. A checkpoint keeps the identity of its run, so that a journal of
    another run is recognised, and moved aside.
    """

    def __init__(self, path: Path, list_saved: Callable[[], list[int]]) -> None:
        self.path = path
        self.list_saved = list_saved
        self.finished: FinishedRollouts | None = None
        self._saved = 0  # step of the newest checkpoint on the disk
        self.run = uuid4().hex[:16]
        self._engine: Engine | None = None
        self._journal: Journal | None = None

    def begin(self, engine: Engine) -> None:
        if engine.source != "prompts":  # nothing else has rollouts
            return
        start = self._find_start()
        environment = engine.environment
        unfinished = environment.unfinished.list_continued() or ()
        self._journal = Journal(self.path, start or time.time(), engine.cluster, unfinished)
        if start is None:
            self._journal.note("run", run=self.run, started=round(time.time(), 3))
        self._engine = engine
        environment.listen(self._journal)
        if not environment.unfinished.active and self.finished is None:  # unfinished groups span several rollouts
            self.finished = self._open_finished(engine)
            environment.unfinished.reuse(self.finished)
        if start is not None or engine.step:
            self._journal.resumed(engine.step, environment)

    def after_step(self, engine: Engine, stats: Stats, batch: BatchRef) -> None:
        if self._journal is None:
            return
        if self.finished is not None:
            self.finished.confirm(engine.step, stats)
            if (saved := max(self.list_saved(), default=0)) > self._saved:
                self._saved = saved
                self.finished.forget_before(saved - engine.config.runtime.max_staleness)
        loss = float(stats["loss/value"].value) if "loss/value" in stats else None
        synced = engine.step if engine.served == engine.step or engine.complete else None
        self._journal.note("trained", step=engine.step, loss=replace_non_finite(loss), synced=synced)
        if restarts := stats.get("faults/restarts"):
            self._journal.note("restarted", step=engine.step, processes=int(restarts.value))

    def after_rewind(self, state: dict[str, Any], *, repeat: bool) -> None:
        if self._engine is None or self._journal is None:
            return
        if self.finished is not None:
            self.finished.go_back(self._engine.step)
        if repeat:
            self._journal.resumed(self._engine.step, self._engine.environment)
        else:
            self._journal.note_rewound(self._engine.step)

    def end(self, engine: Engine) -> None:
        if self._journal is not None:
            self._journal.note("ended", step=engine.step, why=engine.stop)
            self._journal.close()
        if self.finished is not None:
            self.finished.close(complete=engine.complete)

    def state_dict(self) -> dict[str, Any]:
        return {"run": self.run}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.run = state["run"]

    def _open_finished(self, engine: Engine) -> FinishedRollouts:
        inputs = [hook.state_dict() for hook in engine.hooks if isinstance(hook, Provenance)]
        settings = hashlib.sha256(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()[:16]
        return FinishedRollouts(self.path.parent / FOLDER, engine.cluster.store, self.run, settings, engine.step)

    def _find_start(self) -> float | None:
        """Return when this run's journal began; None without one. The journal of another run is moved aside."""
        if not self.path.exists():
            return None
        first = next(read_lines(self.path), None) or {}
        if first.get("run") == self.run:
            return first["started"]
        log.warning("%s is of another run, or damaged; it is now %s", self.path, move_aside(self.path))
        return None
