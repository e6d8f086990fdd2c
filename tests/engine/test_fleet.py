"""When a model gets one more process or one fewer; tests/chaos/test_scaling.py does it on Ray."""

from types import SimpleNamespace

import pytest

from coalign.cluster.dist import DistModel
from coalign.config.schema import AutoscaleConfig
from coalign.engine.fleet import Fleet, _AutoscaleRule, _StepLoad
from coalign.types import Stat, Total

LATE = _StepLoad(busy=0.95, waiting=0.5)  # the trainer waits for a model that computes all the time
EARLY = _StepLoad(busy=0.2, waiting=0.0)
EVEN = _StepLoad(busy=0.7, waiting=0.1)


def decide(rule: _AutoscaleRule, processes: int, *loads: _StepLoad) -> list[int]:
    found = []
    for load in loads:
        processes = rule.decide(processes, load)
        found.append(processes)
    return found


TRAINER_LATE, OTHER_LATE = _StepLoad(busy=1.0, waiting=0.0), _StepLoad(busy=0.6, waiting=0.9)


@pytest.mark.parametrize(
    ("bounds", "processes", "loads", "expected"),
    [
        pytest.param({"max": 3, "steps": 2}, 1, [LATE] * 6, [1, 2, 2, 3, 3, 3], id="one comes, none beyond max"),
        pytest.param({"max": 3, "steps": 3}, 1, [LATE] * 2 + [EVEN] + [LATE] * 3, [1] * 5 + [2], id="begins anew"),
        pytest.param({"max": 4, "steps": 1, "min": 2}, 4, [EARLY] * 3, [3, 2, 2], id="one goes, none below min"),
        pytest.param({"max": 4, "steps": 1}, 2, [TRAINER_LATE], [2], id="the trainer is the slower one"),
        pytest.param({"max": 4, "steps": 1}, 2, [OTHER_LATE], [2], id="it waits for another model"),
        pytest.param({"max": 4, "min": 2}, 1, [EVEN], [2], id="below the bounds"),
        pytest.param({"max": 4, "min": 2}, 6, [EVEN], [4], id="above the bounds"),
    ],
)
def test_processes_come_and_go_by_what_steps_waited_for(bounds, processes, loads, expected):
    assert decide(_AutoscaleRule(AutoscaleConfig(**bounds)), processes, *loads) == expected


@pytest.mark.parametrize("work", [0.3, 0.9, 2.4])
def test_the_number_settles(work):
    """A trainer that takes 1 s a step, and a model with ``work`` seconds of its own, shared by its processes."""
    rule, found, processes = _AutoscaleRule(AutoscaleConfig(max=8, steps=2)), [], 1
    for _ in range(60):
        own = work / processes
        load = _StepLoad(busy=own / max(1.0, own), waiting=max(0.0, own - 1.0) / max(1.0, own))
        processes = rule.decide(processes, load)
        found.append(processes)
    assert len(set(found[20:])) == 1
    assert found == sorted(found)


def test_the_load_is_read_from_the_metrics_of_a_step():
    stats = {"time/step": Total(4.0), "time/rollout": Total(3.0), "idle/policy": Stat(0.25)}
    assert _StepLoad.of("policy", stats) == _StepLoad(busy=0.75, waiting=0.75)


class FewDevices:
    """A cluster with devices for ``places`` replicas."""

    def __init__(self, model: DistModel, places: int) -> None:
        self.model, self.places, self.asked = model, places, []

    def has_place(self, name: str) -> bool:
        return self.model.processes < self.places

    def resize(self, name: str, processes: int) -> int:
        self.asked.append(processes)
        self.model.processes = min(processes, self.places)
        return self.model.processes


def test_a_replica_without_a_place_waits_for_one():
    model = type("Model", (), {"processes": 1})()
    cluster, synced = FewDevices(model, 1), []
    training = type("Training", (), dict.fromkeys(("finish", "reconnect"), lambda self: None))()
    training.sync = synced.append
    engine = type("Engine", (), {"running": {"policy": model}, "learning": [], "cluster": cluster, "step": 3})()
    engine.training, engine.phase, late = training, lambda name: None, {}
    engine.progress = SimpleNamespace(report_late=late.update)
    fleet = Fleet({}, save=lambda engine: None)
    assert fleet.resize(engine, "policy", 2) == "policy: 1 processes since step 3; 1 more wait for devices"
    fleet.adapt(engine, {})
    assert (cluster.asked, synced, late) == ([2], [], {})
    cluster.places = 2  # a node has come
    fleet.adapt(engine, {})
    fleet.adapt(engine, {})
    assert (cluster.asked, synced) == ([2, 2], [3]) and late["processes/policy"].value == 2
    model.processes = 1  # and is lost
    fleet.adapt(engine, {})
    assert model.processes == 2
