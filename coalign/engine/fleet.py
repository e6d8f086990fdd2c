"""Changes the number of processes of each model between two steps, by request or by a rule, if there are devices.

Replicas for which no node has devices wait for one, and the run goes on without them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from coalign.cluster.choice import choose_cluster, plan_slots
from coalign.cluster.future import WorkerError
from coalign.config.errors import ConfigError, ConfigProblem, suggest
from coalign.config.schema import AutoscaleConfig, RunConfig
from coalign.engine.engine import contain_errors
from coalign.roles import Trainable
from coalign.types import Stats, Total

if TYPE_CHECKING:
    from coalign.engine.engine import Engine
    from coalign.launch.plan import PlannedModel

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _StepLoad:
    """The shares of a step in which a model's processes computed (``busy``), and the trainer waited for samples
    (``waiting``)."""

    busy: float
    waiting: float

    @staticmethod
    def of(model: str, stats: Stats) -> _StepLoad:
        """Read the load of a model from the metrics of a step."""
        seconds = max(stats["time/step"].value, 1e-9)
        waited = stats["time/rollout"].value if "time/rollout" in stats else 0.0
        return _StepLoad(1.0 - stats[f"idle/{model}"].value, min(1.0, waited / seconds))


class _AutoscaleRule:
    """Decides how many processes a model should have, by the loads of its last steps.

    A process comes where the trainer waits for samples and the model is busy. One goes where the others would have room
    to spare. Both have to hold for several steps in a row since the last change. Between the two shares of busy time
    nothing changes, so a process that comes is not at once one too many.
    """

    def __init__(self, config: AutoscaleConfig) -> None:
        self.config = config
        self._wishes: deque[int] = deque(maxlen=config.steps)  # 1, 0 or -1 processes more, by each of the last steps

    def decide(self, processes: int, load: _StepLoad) -> int:
        """Return the number of processes after a step that ``processes`` had this load in."""
        self._wishes.append(self._find_wish(processes, load))
        wish = self._wishes[0]
        if len(self._wishes) < self.config.steps or any(earlier != wish for earlier in self._wishes):
            wish = 0
        if wish:
            self._wishes.clear()
        return min(max(processes + wish, self.config.min), self.config.max)

    def _find_wish(self, processes: int, load: _StepLoad) -> int:
        if load.waiting >= self.config.waiting and load.busy >= self.config.busy:
            return 1 if processes < self.config.max else 0
        if processes > self.config.min and load.busy * processes / (processes - 1) <= self.config.free:
            return -1
        return 0


class Fleet:
    """Changes the number of processes of a run's models, and starts replicas later that wait for devices.

    ``save(engine)`` writes the state of trained models, which start again from it, and returns its folder.
    """

    def __init__(self, autoscale: Mapping[str, AutoscaleConfig], save: Callable[[Engine], Path]) -> None:
        self._save = save
        self._rules = {name: _AutoscaleRule(config) for name, config in autoscale.items()}
        self._targets: dict[str, int] = {}  # model -> processes that it should have

    def resize(self, engine: Engine, name: str, processes: int) -> str:
        """Give a model another number of processes; return a sentence that says how many it has since which step.

        ValueError for a number that is not possible, OSError if a training state does not fit into memory, WorkerError
        if new processes cannot load the model.
        """
        if name not in engine.running:
            raise ValueError(f"there is no model of that name; there are {', '.join(engine.running)}")
        previous = engine.running[name].processes
        engine.training.finish()
        if name in engine.learning:
            saved = self._save(engine)
            started = engine.cluster.resize(name, processes)
            engine.running[name].load(str(saved / name)).result()
        else:
            started = engine.cluster.resize(name, processes)
            self._targets[name] = processes
        if started != previous or name in engine.learning:
            engine.training.reconnect()
            engine.training.sync(engine.step)
            engine.progress.report_late({f"processes/{name}": Total(float(started))})
        waiting = f"; {processes - started} more wait for devices" if started < processes else ""
        return f"{name}: {started} processes since step {engine.step}{waiting}"

    def adapt(self, engine: Engine, stats: Stats) -> None:
        """Start replicas whose devices are free by now, and change numbers of processes as the rules say."""
        for name, model in engine.running.items():
            if name in engine.learning:
                continue
            target = self._targets.setdefault(name, model.processes)
            rule = self._rules.get(name)
            if model.processes < target:
                if engine.cluster.has_place(name):
                    self._try(engine, name, target)
            elif rule is not None and f"idle/{name}" in stats:
                load = _StepLoad.of(name, stats)
                if (wanted := rule.decide(target, load)) != target:
                    log.warning("%s: busy for %.0f %%, waited for %.0f %%", name, 100 * load.busy, 100 * load.waiting)
                    self._try(engine, name, wanted)

    def _try(self, engine: Engine, name: str, processes: int) -> None:
        """Change a number of processes, or log why the old one stays."""
        previous = engine.running[name].processes
        engine.phase("scale")
        problems: list[Exception] = []
        with contain_errors(problems.append, (ValueError, OSError, WorkerError)):
            said = self.resize(engine, name, processes)
            if engine.running[name].processes != previous or processes != previous:
                log.warning("%s", said)
        for problem in problems:
            self._targets[name] = engine.running[name].processes
            log.warning("%s: %s", name, str(problem).partition("\n")[0])


def check_autoscale(models: Mapping[str, PlannedModel], config: RunConfig) -> None:
    """Refuse (ConfigError) `runtime.autoscale` for what is no model that samples or scores, or not by Ray."""
    slots = plan_slots({name: model.config for name, model in models.items()}, config.runtime.colocation)
    able = [name for name, model in models.items() if model.role is not Trainable and model.base_of is None]
    for name in config.runtime.autoscale:
        message = None
        if name not in able:
            message = f"is no model that samples or scores{suggest(name, able)}"
        elif len(slots[name].positions) > 1:
            message = "shares its devices (runtime.colocation), so its number of processes cannot change"
        elif choose_cluster(config) != "ray":
            message = "has processes that come and go only on Ray: set runtime.cluster to ray"
        if message:
            raise ConfigError([ConfigProblem(("runtime", "autoscale", name), message)])
