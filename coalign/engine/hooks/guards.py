"""Looks at every step before its weights are used: sick ones are neither served nor saved. See docs/stability.md."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from coalign.config.schema.rollout import GuardsConfig
from coalign.data.batch import Batch
from coalign.engine.engine import Hook
from coalign.engine.hooks.checkpoint import Checkpoints, fill, rewind
from coalign.engine.hooks.run_folder import RunFolder, flatten
from coalign.types import Stat, Stats, Total

if TYPE_CHECKING:
    from coalign.cluster.future import BatchRef
    from coalign.engine.engine import Engine

log = logging.getLogger(__name__)

UNHEALTHY = 3  # exit code of a run that its guards ended
# The metric of each threshold; `max_` ones are bounds from above, `min_` ones from below.
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
    """Refuses a step whose loss or gradient is not finite, and the ``patience``-th in a row beyond a threshold: its
    batch is written to ``failed/``, then the run ends, or goes back to its newest checkpoint and on with later data.

    ``record(step, stats)`` receives the metrics of the step that ends the run.
    """

    def __init__(
        self, config: GuardsConfig, folder: RunFolder, checkpoints: Checkpoints, record: Callable[[int, Stats], None]
    ) -> None:
        self.config = config
        self.folder = folder
        self.checkpoints = checkpoints
        self.record = record
        self.unhealthy = 0  # steps in a row
        self.rollbacks = 0
        self.ended = False  # whether this ended the run

    def begin(self, engine: Engine) -> None:
        """To roll back the first steps there has to be a checkpoint of what came before them."""
        if self.config.action == "rollback" and not self.checkpoints.steps():
            self.checkpoints.write(engine.step, partial(fill, engine))

    def refuses(self, engine: Engine, stats: Stats, batch: BatchRef) -> bool:
        """Raises ValueError if a threshold is set on a metric that no loss reports."""
        broken, beyond = not_finite(stats), beyond_thresholds(stats, self.config)
        self.unhealthy = self.unhealthy + 1 if broken or beyond else 0
        engine.healthy = not self.unhealthy
        stats["guards/unhealthy"] = Total(self.unhealthy)
        if self.config.action == "rollback":
            stats["guards/rollbacks"] = Total(self.rollbacks)
        if beyond and not broken and self.unhealthy < self.config.patience:
            log.warning("step %d: %s", engine.step, "; ".join(beyond))
        if not (broken or self.unhealthy >= self.config.patience):
            return False
        self._act(engine, stats, batch, [*broken, *beyond])
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"unhealthy": self.unhealthy, "rollbacks": self.rollbacks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.unhealthy, self.rollbacks = state["unhealthy"], state["rollbacks"]

    def _act(self, engine: Engine, stats: Stats, batch: BatchRef, reasons: list[str]) -> None:
        said = f"step {engine.step} is unhealthy: {'; '.join(reasons)}"
        dump = write_dump(self._place(engine.step), engine.step, batch.fetch(), stats, reasons)
        if self.config.action == "rollback" and self.rollbacks < self.config.max_rollbacks:
            self._roll_back(engine)
            log.warning("%s. Its batch is in %s. Going on from step %d with later data", said, dump, engine.step)
            return
        if self.config.action == "rollback":
            said = f"{said}, after {self.rollbacks} rollbacks (runtime.guards.max_rollbacks)"
        self.ended = True
        self.record(engine.step, stats)
        good = self.checkpoints.steps()
        left = f"the newest checkpoint is of step {good[-1]}" if good else "there is no checkpoint yet"
        engine.stop = f"{said}. Its batch is in {dump}; {left}"
        log.error("stopping: %s", engine.stop)

    def _roll_back(self, engine: Engine) -> None:
        self.rollbacks += 1
        self.unhealthy = 0
        engine.healthy = True
        rewind(engine, self.checkpoints.newest())
        self.folder.metrics.cut(engine.step)
        self.folder.samples.cut(engine.step)
        # With the cursor of now and the count: a run that is killed here must not meet the same data again.
        self.checkpoints.write(engine.step, partial(fill, engine))

    def _place(self, step: int) -> Path:
        again = f"_after_{self.rollbacks}_rollbacks" if self.rollbacks else ""
        return self.folder.path / "failed" / f"step_{step}{again}.pt"


def not_finite(stats: Stats) -> list[str]:
    """What is NaN or infinite among the losses and gradient norms of all models that learn."""
    found = []
    for name, metric in stats.items():
        if name.endswith("loss/not_finite"):
            found.append(
                f"{int(metric.value)} updates with a gradient that is not finite ({name}); they were not applied"
            )
        counted = not isinstance(metric, Stat) or metric.count > 0
        if name.endswith(("loss/value", "loss/grad_norm")) and counted and not math.isfinite(metric.value):
            found.append(f"{name} is {metric.value}")
    return found


def beyond_thresholds(stats: Stats, config: GuardsConfig) -> list[str]:
    """Which thresholds the step's metrics are beyond; NaN is beyond all. A step without an update need not report what
    is asked for. Raises what `check_reported` raises."""
    if "loss/value" in stats:
        check_reported(config, stats)
    found = []
    for key, name, limit in _thresholds(config):
        sign = 1.0 if key.startswith("max_") else -1.0
        if name in stats and not sign * stats[name].value <= sign * limit:
            found.append(f"{name} is {stats[name].value:.4g} (runtime.guards.{key}: {limit:g})")
    return found


def check_reported(config: GuardsConfig, reported: Collection[str]) -> None:
    """Refuse (ValueError) a threshold on a metric that the main model's loss does not report."""
    for key, name, limit in _thresholds(config):
        if name not in reported:
            others = [f"{other} ({metric})" for other, metric in METRICS.items() if metric in reported]
            there = f"there may be: {', '.join(others)}" if others else "it has none that guards could bound"
            raise ValueError(f"runtime.guards.{key} is {limit:g}, and the loss reports no `{name}`; {there}")


def _thresholds(config: GuardsConfig) -> Iterator[tuple[str, str, float]]:
    """(key, metric, limit) of those that are set."""
    return ((key, name, limit) for key, name in METRICS.items() if (limit := getattr(config, key)) is not None)


def write_dump(path: Path, step: int, batch: Batch, stats: Stats, reasons: list[str]) -> Path:
    """Write what `read_dump` reads."""
    path.parent.mkdir(exist_ok=True)
    columns = {"lengths": batch.lengths, "token": dict(batch.token), "sequence": dict(batch.sequence)}
    torch.save({"step": step, "reasons": reasons, "metrics": flatten(stats), "batch": columns}, path)
    return path


def read_dump(path: str | Path) -> tuple[Batch, dict[str, Any]]:
    """The batch of an unhealthy step as it came from the environment, and ``step``, ``reasons`` and ``metrics``."""
    dump = torch.load(path, weights_only=True)
    return Batch(**dump.pop("batch")), dump
