"""The rollout side of the loop: what is drawn when, in which order steps get it, and what a checkpoint keeps of it."""

import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coalign.cluster.future import Call, Future, Outcome
from coalign.cluster.local import LocalCluster
from coalign.config.schema import RolloutConfig, RunConfig
from coalign.data.batch import Batch
from coalign.engine.environment import MAX_BUNDLES_PER_STEP, Environment
from coalign.engine.rollouts.bundle import Bundle
from coalign.engine.rollouts.selection import GroupSelection
from coalign.engine.rollouts.unfinished import CompleteGroups
from coalign.types import EffectiveSize, Max, Stat, Total, merge_stats


class Prompts:
    """A loader of groups 0, 1, 2, … of one sequence each."""

    sources = ("prompts",)

    def __init__(self, batch_size=4):
        self.batch_size, self.drawn = batch_size, 0

    def next(self, rows=None):
        count = self.batch_size if rows is None else rows
        group = torch.arange(self.drawn, self.drawn + count)
        self.drawn += count
        token = {"tokens": torch.ones(count, dtype=torch.int32), "loss_mask": torch.ones(count, dtype=torch.bool)}
        return Batch(torch.ones(count), token, {"group": group})

    def stats(self):
        return {}

    def state_dict(self):
        return {"drawn": self.drawn}

    def load_state_dict(self, state):
        self.drawn = state["drawn"]


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(RunConfig(algorithm="none")) as cluster:
        yield cluster


def build(cluster, staleness=0, last=10, flow=None, batch_size=4, **selection):
    """An environment whose flow gives the prompts back; ``seen`` has what each run of the flow got, and when."""
    seen = []
    clock = SimpleNamespace(version=0)

    def note(prompts):
        seen.append((clock.version, prompts.group.tolist()))
        return flow(prompts) if flow else prompts

    selection = GroupSelection(max_age=staleness, **selection)
    unfinished = CompleteGroups(cluster, RolloutConfig(), samples=1)
    options = {"max_staleness": staleness, "last": last, "on_wait": lambda: None}
    environment = Environment(cluster, note, Prompts(batch_size), unfinished, selection, **options)

    def take(version):
        clock.version = version
        return environment.next(version, version)[0].group.tolist()

    return environment, take, seen


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(staleness=st.integers(0, 5), last=st.integers(1, 9))
def test_every_step_gets_its_groups_and_none_is_staler_than_the_bound(cluster, staleness, last):
    _, take, seen = build(cluster, staleness, last)
    for step in range(last):
        assert take(step) == list(range(4 * step, 4 * step + 4))
        drawn = {group: version for version, groups in seen for group in groups}
        assert len(drawn) == 4 * min(step + staleness + 1, last)  # as far ahead as allowed, and no further
        assert all(drawn[group] == max(0, step - staleness) for group in range(4 * step, 4 * step + 4))


def test_prompts_of_a_step_go_through_the_flow_in_bundles_in_the_order_drawn(cluster):
    _, take, seen = build(cluster, staleness=1, last=1, batch_size=20)
    assert take(0) == list(range(20))
    sizes = [len(groups) for _, groups in seen]
    assert len(sizes) == MAX_BUNDLES_PER_STEP and max(sizes) - min(sizes) <= 1
    assert [group for _, groups in seen for group in groups] == list(range(20))


def test_what_a_filter_drops_is_replaced_by_groups_of_the_next_step(cluster):
    keep = SimpleNamespace(func=odd, keywords={})
    environment, take, _ = build(cluster, staleness=1, groups=4, filter=keep, max_rounds=10)
    assert take(0) == [1, 3, 5, 7] and take(1) == [9, 11, 13, 15]
    assert environment.kept_share == 0.5


def odd(group):
    return group % 2 == 1


def test_a_checkpoint_keeps_what_is_complete_and_begins_the_rest_again(cluster):
    gate = LateCalls(cluster)
    environment, take, seen = build(cluster, staleness=1, last=3, flow=gate.flow)
    gate.allow(4)
    assert take(0) == [0, 1, 2, 3]
    gate.allow(2)
    for _, bundle in list(environment.under_way)[:2]:
        bundle.wait()
    state = environment.fetch_state(environment.snapshot())  # waits for nobody
    assert [("batches" in entry) for entry in state["under_way"]] == [True, True, False, False]
    gate.allow(10)

    later, again, seen = build(cluster, staleness=1, last=3)
    later.load_state_dict(state)
    assert not seen  # its weights may not be there yet
    assert again(1) == [4, 5, 6, 7] and again(2) == [8, 9, 10, 11]
    assert [groups for _, groups in seen] == [[6], [7], [8], [9], [10], [11]]


class LateCalls:
    """A flow whose bundles end, in the order begun, when they are allowed to."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.open, self.allowed, self.calls = 0, 0, []

    def flow(self, prompts):
        future = Future(Call(None, "late"))
        self.calls.append(lambda: future.succeed(Outcome(prompts, {})))
        self._release()
        return future

    def allow(self, count):
        self.allowed += count
        self._release()

    def _release(self):
        while self.open < min(self.allowed, len(self.calls)):
            self.calls[self.open]()
            self.open += 1


def test_every_kind_of_metric_goes_on_to_be_merged(cluster):
    of_weights = EffectiveSize.of(torch.tensor([1.0, 3.0]))
    before = {"mean": Stat(3.0, 2.0), "most": Max(5.0), "count": Total(7.0), "share": of_weights}
    groups = cluster.put(Batch(torch.ones(2), {}, {"group": torch.tensor([4, 4])}))
    state = Bundle(version=3, target=1, batches={"groups": groups}, earlier_stats=before).state_dict()
    state |= {"before": json.loads(json.dumps(state["before"]))}
    restored = build(cluster)[0]._restore(state)
    batches, again = restored.wait()
    assert (restored.version, restored.target) == (3, 1) and batches["groups"].fetch()["group"].tolist() == [4, 4]
    assert again == before
    later = {"mean": Stat(1.0), "most": Max(6.0), "count": Total(1.0), "share": EffectiveSize.of(torch.tensor([2.0]))}
    merged = merge_stats([again, later])
    assert [merged[name].value for name in ("mean", "most", "count")] == [4 / 3, 6.0, 8.0]
    assert merged["share"].value == 36 / (3 * 14)  # of the weights 1, 3, 2 together
