"""When a model gets one more process or one fewer; tests/chaos/test_scaling.py does it on Ray."""

from types import SimpleNamespace

import pytest

from coalign import load_config
from coalign.cluster.dist import DistModel
from coalign.config.errors import ConfigError
from coalign.config.schema import AutoscaleConfig
from coalign.engine.fleet import AutoscaleRule, Fleet, StepLoad
from coalign.launch.plan import prepare
from coalign.types import Stat, Total
from tests.runs import settings

LATE = StepLoad(busy=0.95, waiting=0.5)  # the trainer waits for a model that computes all the time
EARLY = StepLoad(busy=0.2, waiting=0.0)
EVEN = StepLoad(busy=0.7, waiting=0.1)


def decide(rule: AutoscaleRule, processes: int, *loads: StepLoad) -> list[int]:
    found = []
    for load in loads:
        processes = rule.decide(processes, load)
        found.append(processes)
    return found


def test_a_process_comes_after_several_steps_that_waited_and_none_beyond_the_most():
    rule = AutoscaleRule(AutoscaleConfig(max=3, steps=2))
    assert decide(rule, 1, LATE, LATE, LATE, LATE, LATE, LATE) == [1, 2, 2, 3, 3, 3]


def test_a_step_that_says_something_else_begins_anew():
    rule = AutoscaleRule(AutoscaleConfig(max=3, steps=3))
    assert decide(rule, 1, LATE, LATE, EVEN, LATE, LATE, LATE) == [1, 1, 1, 1, 1, 2]


def test_a_process_goes_where_the_others_have_room_and_none_below_the_fewest():
    rule = AutoscaleRule(AutoscaleConfig(max=4, steps=1, min=2))
    assert decide(rule, 4, EARLY, EARLY, EARLY) == [3, 2, 2]


def test_nobody_else_waiting_or_another_model_being_late_changes_nothing():
    rule = AutoscaleRule(AutoscaleConfig(max=4, steps=1))
    assert decide(rule, 2, StepLoad(busy=1.0, waiting=0.0)) == [2]  # the trainer is the slower one
    assert decide(rule, 2, StepLoad(busy=0.6, waiting=0.9)) == [2]  # it waits for another model


@pytest.mark.parametrize("work", [0.3, 0.7, 0.9, 1.3, 2.4])
def test_the_number_settles(work):
    """A trainer that takes 1 s a step, and a model with ``work`` seconds of its own, shared by its processes."""
    rule, found, processes = AutoscaleRule(AutoscaleConfig(max=8, steps=2)), [], 1
    for _ in range(60):
        own = work / processes
        load = StepLoad(busy=own / max(1.0, own), waiting=max(0.0, own - 1.0) / max(1.0, own))
        processes = rule.decide(processes, load)
        found.append(processes)
    assert len(set(found[20:])) == 1
    assert found == sorted(found)


def test_numbers_outside_of_the_bounds_are_brought_back_at_once():
    rule = AutoscaleRule(AutoscaleConfig(max=4, min=2))
    assert (rule.decide(1, EVEN), rule.decide(6, EVEN)) == (2, 4)


def test_the_load_is_read_from_the_metrics_of_a_step():
    stats = {"time/step": Total(4.0), "time/rollout": Total(3.0), "idle/policy": Stat(0.25)}
    assert StepLoad.of("policy", stats) == StepLoad(busy=0.75, waiting=0.75)


def test_bounds_that_contradict_each_other_are_refused(tmp_path):
    def load(**autoscale):
        config = settings(tmp_path, "grpo", autoscale={"policy": autoscale}, cluster="ray")
        return load_config(config)

    with pytest.raises(ConfigError, match=r"runtime\.autoscale\.policy\.max: is 1, and min is 2"):
        load(min=2, max=1)
    with pytest.raises(ConfigError, match=r"runtime\.autoscale\.policy\.free: is 0\.9, and busy is 0\.8"):
        load(max=2, free=0.9)


@pytest.mark.parametrize(
    ("name", "more", "problem"),
    [
        ("polcy", {}, "is no model that samples or scores.*did you mean 'policy'"),
        ("trainer", {}, "is no model that samples or scores"),
        ("policy", {"colocation": [["policy", "trainer"]]}, "shares its devices"),
        ("policy", {"cluster": "local"}, "only on Ray"),
    ],
)
def test_models_whose_number_cannot_change_are_refused(tmp_path, name, more, problem):
    config = settings(tmp_path, "grpo", autoscale={name: {"max": 2}}, **({"cluster": "ray"} | more))
    with pytest.raises(ConfigError, match=problem):
        prepare(load_config(config))


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
