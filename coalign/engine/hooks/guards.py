"""Checks every step before its weights are used: unhealthy ones are neither synced nor saved. See docs/stability.md."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coalign.config.schema import RunConfig
from coalign.config.schema.rollout import GuardsConfig
from coalign.data.batch import Batch, load_batches, save_batches
from coalign.engine.engine import Hook
from coalign.engine.hooks.run_folder import RunFolder, flatten_stats
from coalign.files import Sink, describe_problem
from coalign.types import Stat, Stats, Total

if TYPE_CHECKING:
    from coalign.algorithms.objective import Objective
    from coalign.checkpoint.schedule import Save
    from coalign.cluster.batch_ref import BatchRef
    from coalign.engine.engine import Engine

log = logging.getLogger(__name__)

FLAT_STEPS = 3
UNHEALTHY = 3  # exit code of a run that its guards ended
# The metric of each threshold; `max_` ones are upper bounds, `min_` ones lower bounds.
METRICS = {
    "max_approx_kl": "loss/approx_kl",
    "max_kl_ref": "loss/kl_ref",
    "min_entropy": "loss/entropy",
    "max_mismatch": "loss/mismatch",
    "max_mismatch_max": "loss/mismatch_max",
    "max_mismatch_kl": "loss/mismatch_kl",
    "min_ess": "loss/ess",
}


class Guards(Hook):
    """Refuses a step whose loss or gradient is not finite, and the ``patience``-th step in a row beyond a threshold.

    The step's batch is written to ``failed/``. Then the run ends, or returns to its newest checkpoint and continues
    with later data. ``record(step, stats)`` receives the metrics of the step that ends the run.
    """

    def __init__(
        self, config: GuardsConfig, folder: RunFolder, save: Save, record: Callable[[int, Stats], None]
    ) -> None:
        self.config = config
        self.folder = folder
        self.save = save
        self.record = record
        self.unhealthy = 0  # steps in a row
        self.rollbacks = 0
        self.ended = False  # whether this ended the run

    def begin(self, engine: Engine) -> None:
        """Write a checkpoint if there is none: the first steps need one to roll back to."""
        if self.config.action == "rollback" and not self.save.disk.steps():
            engine.phase("save")
            self.save.save_now(engine)
            engine.phase("hooks")

    def refuses(self, engine: Engine, stats: Stats, batch: BatchRef) -> bool:
        """Raises ValueError if a threshold is set on a metric that no loss reports."""
        broken, exceeded = _list_non_finite(stats), _list_exceeded(stats, self.config)
        self.unhealthy = self.unhealthy + 1 if broken or exceeded else 0
        engine.progress.judge_step(not self.unhealthy)
        stats["guards/unhealthy"] = Total(self.unhealthy)
        if self.config.action == "rollback":
            stats["guards/rollbacks"] = Total(self.rollbacks)
        if exceeded and not broken and self.unhealthy < self.config.patience:
            log.warning("step %d: %s", engine.step, "; ".join(exceeded))
        if not (broken or self.unhealthy >= self.config.patience):
            return False
        self._end_or_roll_back(engine, stats, batch, [*broken, *exceeded])
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"unhealthy": self.unhealthy, "rollbacks": self.rollbacks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.unhealthy, self.rollbacks = state["unhealthy"], state["rollbacks"]

    def _end_or_roll_back(self, engine: Engine, stats: Stats, batch: BatchRef, reasons: list[str]) -> None:
        message = f"step {engine.step} is unhealthy: {'; '.join(reasons)}"
        try:
            self.save.disk.finish()
        except Exception as problem:  # then an older one counts
            log.warning("the checkpoint that was being written could not be: %s", problem)
        suffix = f"_after_{self.rollbacks}_rollbacks" if self.rollbacks else ""
        dump = self.folder.path / "failed" / f"step_{engine.step}{suffix}.pt"
        with Sink(str(dump)).survive():
            _write_dump(dump, engine.step, batch.fetch(), stats, reasons)
        if self.config.action == "rollback" and self.rollbacks < self.config.max_rollbacks:
            self.rollbacks += 1
            self.unhealthy = 0
            engine.progress.judge_step(True)
            self.save.roll_back(engine)
            self.folder.cut(engine.step)
            log.warning("%s. Its batch is in %s. Continuing from step %d with later data", message, dump, engine.step)
            return
        if self.config.action == "rollback":
            message = f"{message}, after {self.rollbacks} rollbacks (runtime.guards.max_rollbacks)"
        self.ended = True
        self.record(engine.step, stats)
        good = self.save.disk.steps()
        left = f"the newest checkpoint is of step {good[-1]}" if good else "there is no checkpoint yet"
        engine.progress.request_stop(f"{message}. Its batch is in {dump}; {left}")
        log.error("stopping: %s", engine.stop)


class FlatRewards(Hook):
    """Warns after `FLAT_STEPS` steps in a row in which all samples that are compared earned the same."""

    def __init__(self) -> None:
        self.flat = 0  # steps in a row

    def after_step(self, engine: Engine, stats: Stats, batch: BatchRef) -> None:
        is_constant = "reward/std" in stats and stats["reward/std"].value == 0
        is_flat = is_constant or ("groups/zero_std" in stats and stats["groups/zero_std"].value == 1)
        self.flat = self.flat + 1 if is_flat else 0
        if self.flat != FLAT_STEPS:
            return
        if is_constant:
            cause = (
                f"every sample earned {stats['reward/mean'].value:g}. Does the reward read the response, and does its "
                "answer have the form of the rows'? Look at samples.jsonl"
            )
        else:
            cause = (
                "the samples of each prompt earned the same. The prompts are too easy or too hard, or have too few "
                "samples (runtime.samples_per_prompt); `filter: varied` looks for others"
            )
        log.warning("step %d: nothing was learned in %d steps in a row: %s", engine.step, self.flat, cause)

    def state_dict(self) -> dict[str, Any]:
        return {"flat": self.flat}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.flat = state["flat"]


def _list_non_finite(stats: Stats) -> list[str]:
    """Describe the losses and gradient norms of all trained models that are NaN or infinite."""
    problems = []
    for name, metric in stats.items():
        if name.endswith("loss/not_finite"):
            problems.append(
                f"{int(metric.value)} updates with a gradient that is not finite ({name}); they were not applied"
            )
        counted = not isinstance(metric, Stat) or metric.count > 0
        if name.endswith(("loss/value", "loss/grad_norm")) and counted and not math.isfinite(metric.value):
            problems.append(f"{name} is {metric.value}")
    return problems


def _list_exceeded(stats: Stats, config: GuardsConfig) -> list[str]:
    """Describe the thresholds that the step's metrics exceed; NaN exceeds all of them.

    A step without an update may lack the metrics. Otherwise raises what `check_reported` raises.
    """
    if "loss/value" in stats:
        check_reported(config, stats)
    exceeded = []
    for key, name, limit in _thresholds(config):
        sign = 1.0 if key.startswith("max_") else -1.0
        if name in stats and not sign * stats[name].value <= sign * limit:
            exceeded.append(f"{name} is {stats[name].value:.4g} (runtime.guards.{key}: {limit:g})")
    return exceeded


def check_reported(config: GuardsConfig, reported: Collection[str]) -> None:
    """Raise ValueError for a threshold on a metric that the main model's loss does not report."""
    for key, name, limit in _thresholds(config):
        if name not in reported:
            usable = [f"{usable_key} ({metric})" for usable_key, metric in METRICS.items() if metric in reported]
            hint = f"there may be: {', '.join(usable)}" if usable else "it has none that guards could bound"
            raise ValueError(f"runtime.guards.{key} is {limit:g}, and the loss reports no `{name}`; {hint}")


def _thresholds(config: GuardsConfig) -> Iterator[tuple[str, str, float]]:
    """Yield (key, metric, limit) of each threshold that is set."""
    return ((key, name, limit) for key, name in METRICS.items() if (limit := getattr(config, key)) is not None)


def _write_dump(path: Path, step: int, batch: Batch, stats: Stats, reasons: list[str]) -> None:
    """Write the file that `read_dump` reads."""
    path.parent.mkdir(exist_ok=True)
    save_batches({"step": step, "reasons": reasons, "metrics": flatten_stats(stats), "batch": batch}, path)


def read_dump(path: str | Path) -> tuple[Batch, dict[str, Any]]:
    """Return the batch of an unhealthy step, as the environment made it, and ``step``, ``reasons``, ``metrics``.

    Raises ValueError for a file that `_write_dump` has not written.
    """
    try:
        dump = load_batches(path)
        if not isinstance(dump["batch"], Batch):
            raise TypeError("`batch` is no batch")
        return dump.pop("batch"), dump
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:  # a damaged pickle raises almost anything
        raise ValueError(f"{path} is no dump of an unhealthy step: {describe_problem(error)}") from error


def check_guards(objective: Objective, config: RunConfig) -> None:
    """Refuse a bound on the entropy where the main model's loss can measure it and is not set to."""
    least = config.runtime.guards.min_entropy
    if least is not None and hasattr(objective.loss, "measure_entropy") and "entropy" not in objective.needs:
        raise ValueError(
            f"runtime.guards.min_entropy is {least:g}, and the loss `{objective.name}` does not measure the entropy; "
            f"set {objective.section}.measure_entropy: true"
        )
