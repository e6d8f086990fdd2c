"""What a run saves, and when: ``Save`` on the disk, with copies elsewhere, and ``SaveInMemory``.

``checkpoints/step_N/`` holds:

- ``state.json``: step, data position, state of the recipe and of the hooks (Provenance: settings, hashes of models);
- ``buffer.pt``: batches between environment and trainer;
- ``models/<name>/``: the state with which that backend continues bit for bit;
- ``hf/``: the trained model as a Hugging Face directory; ``hf_<name>/`` for every further model that is trained,
  ``hf_ema/`` for an average of the weights, ``adapter/`` for LoRA adapters;
- ``manifest.json``: size and SHA-256 of every other file. It is written last.

Training waits only until the state is copied to host memory (backends without `begin_saves`: until it is written).
folder.py completes the checkpoint meanwhile.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coalign.checkpoint.resume import MODELS, RunStores, find_distant_model, find_newest, rewind_engine
from coalign.config.schema.runtime import RuntimeConfig
from coalign.data.batch import save_batches
from coalign.engine.engine import Hook, contain_errors
from coalign.engine.hooks.evaluation import is_improvement
from coalign.files import Sink
from coalign.types import Stats, Total

if TYPE_CHECKING:
    from coalign.cluster.batch_ref import BatchRef
    from coalign.cluster.dist import DistModel
    from coalign.cluster.future import Future
    from coalign.engine.engine import Engine

log = logging.getLogger(__name__)


class _ModelFiles:
    """The files that the workers of ``models`` write in the background: an UnfinishedFiles."""

    def __init__(self) -> None:
        self.models: list[DistModel[Any]] = []
        self.paths: list[Path] = []

    def finish(self) -> None:
        """Wait for all models, then raise the first error."""
        calls = [model.call("finish_saves", fatal=False) for model in self.models]
        problems = []
        for call in calls:
            try:
                call.result()
            except Exception as problem:
                problems.append(problem)
        if problems:
            raise problems[0]


def _write_engine_state(
    engine: Engine, directory: Path, snapshot: dict[str, Any] | None = None, *, exports: bool = True
) -> _ModelFiles:
    """Write the files of a checkpoint, all but the manifest; return those that workers still write.

    ``snapshot`` is the newest step's (None: it is taken now). ``exports``: also write directories for other programs.
    """
    state = engine.snapshot() if snapshot is None else dict(snapshot)
    environment = engine.environment.fetch_state(state.pop("environment"))
    state |= {
        "algorithm": engine.config.algorithm,
        "loader": environment.pop("loader"),
        "rewards": engine.rewards.fetch_state(state["rewards"]) if engine.rewards else {},
        "hooks": {type(hook).__name__: hook.state_dict() for hook in engine.hooks},
    }
    (directory / "state.json").write_text(json.dumps(state, indent=1))
    save_batches(environment, directory / "buffer.pt")
    files, saves = _ModelFiles(), []
    save_starts = [engine.running[name].call("begin_saves", fatal=False) for name in engine.learning]
    try:
        for i, (name, save_start) in enumerate(zip(engine.learning, save_starts, strict=True)):
            model, suffix = engine.running[name], "" if i == 0 else f"_{name}"
            writes: dict[Path, Callable[[str], Future]] = {directory / MODELS / name: model.save}
            if exports:
                writes[directory / f"hf{suffix}"] = model.save_hf
            if exports and model.config.ema:
                writes[directory / f"hf{suffix}_ema"] = partial(model.save_hf, average=True)
            if exports and model.config.lora:
                writes[directory / f"adapter{suffix}"] = model.save_adapter
            saves += [save(str(path)) for path, save in writes.items()]
            if save_start.result():
                files.models.append(model)
                files.paths += writes
        for save in saves:
            save.result()
    except Exception:
        with suppress(Exception):
            files.finish()  # nobody may write into a directory that is deleted
        raise
    return files


class Save(Hook):
    """Begins a checkpoint every `save_every` steps and `save_minutes`, at the end, and when the loop is asked to stop.

    It is written while training goes on. The next one, a rollback and the end of the run wait for it. An unhealthy step
    (coalign.engine.hooks.guards) is not saved unless the run ends there. A checkpoint that cannot be written, for
    whatever reason, does not end the run: a warning names the last good one. Only the first checkpoint (a run that
    cannot save should not continue) and the last one must succeed. Complete checkpoints are also copied elsewhere; only
    the end of the run waits for the copies.
    """

    def __init__(self, stores: RunStores, runtime: RuntimeConfig) -> None:
        self.disk, self.remote = stores.disk, stores.remote
        self.runtime = runtime
        self._saved_at = time.monotonic()  # start of the newest checkpoint
        self.best: tuple[float, int] | None = None  # value, step
        self._kept: int | None = None  # the best step that has a checkpoint
        self._step = 0  # step of the newest checkpoint
        self._first = 0  # step at which this process began
        self.disk.on_complete = self._tidy

    def begin(self, engine: Engine) -> None:
        self._first = engine.step

    def after_step(self, engine: Engine, stats: Stats, batch: BatchRef) -> None:
        last = engine.complete or engine.stop is not None
        if self.remote and (failures := self.remote.take_failures()):
            engine.progress.report_late({"checkpoint/remote_failed": Total(failures)})
        metric = stats.get(self.runtime.best or "")
        best = self.best and self.best[0]
        if metric and engine.progress.healthy and is_improvement(metric.value, best, self.runtime.best_mode):
            self.best = (metric.value, engine.step)
        if not (last or (engine.progress.healthy and self._is_due(engine))):
            self._complete(engine, wait=False)
            return
        engine.phase("save")
        self._complete(engine, wait=True)
        self._step = engine.step
        with contain_errors(partial(self._report, engine, fatal=last)):
            self.disk.begin(engine.step, partial(_write_engine_state, engine))
        self._saved_at = time.monotonic()
        if last:
            self._complete(engine, wait=True, fatal=True)
        engine.phase("hooks")

    def _is_due(self, engine: Engine) -> bool:
        """Whether to save this step: since it is the best one, by its number, or by the time."""
        is_best = self.best is not None and self.best[1] == engine.step
        every, seconds = self.runtime.save_every, 60.0 * self.runtime.save_minutes
        overdue = seconds > 0 and time.monotonic() - self._saved_at >= seconds
        # Between two syncs the generators have older weights.
        return is_best or (every > 0 and engine.step % every == 0) or (overdue and engine.served == engine.step)

    def save_now(self, engine: Engine) -> Path:
        """Write a checkpoint of the last step, unless there is one, and wait for it; return its path.

        Raises what writing raises.
        """
        self._complete(engine, wait=True)
        if engine.step not in self.disk.steps():
            self._step = engine.step
            self.disk.write(engine.step, partial(_write_engine_state, engine))
            self._saved_at = time.monotonic()
        return self.disk.path(engine.step)

    def roll_back(self, engine: Engine) -> None:
        """Return to the newest checkpoint, go on with data not drawn yet, and save that.

        Raises RuntimeError without one, CorruptCheckpoint if all are damaged, and what writing raises.
        """
        newest = find_newest([self.disk])
        if newest is None:
            raise RuntimeError(f"no checkpoint in {self.disk.directory} is intact, so the step stays unhealthy")
        rewind_engine(engine, newest, repeat=False)
        # With the current data position and count: a run that is killed here must not meet the same data again.
        self.disk.write(engine.step, partial(_write_engine_state, engine))

    def end(self, engine: Engine) -> None:
        engine.phase("save")
        if engine.stop is not None and engine.progress.healthy and engine.step > self._first:
            self.save_now(engine)  # a signal may have come after `after_step`
        self._complete(engine, wait=True)
        self._finish_copies()
        engine.phase("hooks")

    def save_after_error(self, engine: Engine, error: Exception) -> None:
        """Write a checkpoint of the last step, if it has none; add a note to ``error`` that says where to continue.

        Samples of rollouts that have failed or not ended are not kept: the run generates them again.
        """
        engine.cluster.accept_calls()
        try:
            self.disk.finish()
        except Exception as problem:
            error.add_note(f"step {self._step} could not be saved: {_first_line(problem)}")
        snapshot = engine.progress.consistent_state
        steps = self.disk.steps()
        new = engine.step > self._first and engine.step not in steps
        if snapshot is not None and engine.progress.healthy and new:
            try:
                self.disk.write(engine.step, partial(_write_engine_state, engine, snapshot=snapshot))
                steps.append(engine.step)
            except Exception as problem:
                error.add_note(f"step {engine.step} could not be saved: {_first_line(problem)}")
        if steps:
            error.add_note(f"saved up to step {max(steps)}: the same command continues there")
        self._finish_copies()

    def _finish_copies(self) -> None:
        if self.remote:
            self.remote.finish()
            with suppress(OSError):
                self._prune()  # checkpoints that were held until they were copied

    def _complete(self, engine: Engine, *, wait: bool, fatal: bool = False) -> None:
        """Handle the end of a checkpoint that is being written; with ``wait``, wait for it."""
        with contain_errors(partial(self._report, engine, fatal=fatal)):
            self.disk.finish() if wait else self.disk.poll()

    def _report(self, engine: Engine, problem: Exception, *, fatal: bool) -> None:
        """Log that the newest checkpoint could not be written; raise ``problem`` if it is ``fatal``, or the first.

        Libraries that write tensors report a full disk by their own error types.
        """
        good = self.disk.steps()
        free = f"{shutil.disk_usage(self.disk.directory).free / 2**20:.1f} MiB are free on that disk"
        if fatal or not good:
            problem.add_note(f"the checkpoint of step {self._step} could not be written; {free}")
            raise problem
        log.warning(
            "the checkpoint of step %d could not be written (%s; %s); training continues, the last good one is step %d",
            self._step,
            _first_line(problem),
            free,
            good[-1],
        )
        engine.progress.report_late({"checkpoint/failed": Total(1.0)})

    def _tidy(self, step: int) -> None:
        """Point `model` to the best or newest checkpoint, and delete old ones."""
        if self.best is not None and self.best[1] in self.disk.steps():
            self._kept = self.best[1]  # until then the previous best one stays
        if self.remote:  # if the run folder was lost, the best checkpoint may exist there only
            self.remote.begin(step, self.best[1] if self._kept is None and self.best else self._kept)
        try:
            self.disk.link_model(step if self._kept is None else self._kept)
            self._prune()
        except OSError as problem:
            log.warning("the checkpoint of step %d is complete, but: %s", step, problem)

    def _prune(self) -> None:
        self.disk.prune(self._kept, self.remote.list_held() if self.remote else ())

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = tuple(state["best"]) if state["best"] else None


class SaveInMemory(Hook):
    """Writes a checkpoint in memory every `save_in_memory_every` steps (0: never), without exports.

    One that cannot be written is logged, and the run goes on.
    """

    def __init__(self, stores: RunStores, every: int) -> None:
        self.memory, self.disk = stores.memory, stores.disk
        self.every = every
        self._sink = Sink(f"the checkpoint in memory ({self.memory.directory}; runtime.save_in_memory_every)")
        self.memory.on_complete = self._tidy

    def begin(self, engine: Engine) -> None:
        """Write the first checkpoint. ValueError if a trained model has processes on another node than the driver."""
        if self.every and (name := find_distant_model(engine)):
            raise ValueError(
                f"runtime.save_in_memory_every is {self.every}, and models.{name} has processes on another node than "
                "the driver, which cannot read this one's memory: set it to 0, and `runtime.save_every` to as many "
                "steps as you can bear to lose"
            )
        if self.every and engine.step not in (*self.memory.steps(), *self.disk.steps()):
            self._write(engine)

    def after_step(self, engine: Engine, stats: Stats, batch: BatchRef) -> None:
        if self.every and engine.progress.healthy and engine.step % self.every == 0 and engine.served == engine.step:
            self._write(engine)

    def before_training(self, engine: Engine) -> None:
        """Wait until the last step's checkpoint is complete, so that at most the current step can be lost."""
        with contain_errors(self._report):
            self.memory.finish()

    def save_models(self, engine: Engine) -> Path:
        """Write a checkpoint of the last step, unless there is one; return the folder of its trained models.

        It is on disk where the cluster has several nodes: processes that load it may be on any of them. Raises OSError.
        """
        in_memory = len(engine.cluster.nodes) <= 1
        folder = self.memory if in_memory else self.disk
        folder.finish()
        if engine.step not in folder.steps():
            folder.write(engine.step, partial(_write_engine_state, engine, exports=not in_memory))
        return folder.path(engine.step) / MODELS

    def end(self, engine: Engine) -> None:
        """Free the memory: the last checkpoint is on the disk."""
        self.before_training(engine)
        self.memory.clear()

    def _write(self, engine: Engine) -> None:
        engine.phase("save")
        with contain_errors(self._report):
            self.memory.finish()
            if name := find_distant_model(engine):
                raise OSError(f"models.{name} now has processes on another node than the driver")
            self.memory.begin(engine.step, partial(_write_engine_state, engine, exports=False))
        engine.phase("hooks")

    def _tidy(self, step: int) -> None:
        """Delete old checkpoints after one has become complete."""
        with self._sink.survive():
            self.memory.prune(None)

    def _report(self, problem: Exception) -> None:
        with self._sink.survive(Exception):
            raise problem


def _first_line(problem: Exception) -> str:
    return str(problem).partition("\n")[0]
