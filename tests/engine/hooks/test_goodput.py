"""Where the time of a run went: worked out by hand on a clock that stands still, and in short runs."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest

from coalign.engine.hooks.goodput import CAUSES, Goodput
from coalign.engine.hooks.run_folder import RunFolder, StepLog, flatten_stats
from coalign.types import Stat, Total
from tests.runs import metrics, run, settings


class Run:
    """A goodput hook on a clock that only ``wait`` moves."""

    def __init__(self, path, state=None):
        self.now = 100.0
        self.log = StepLog(path)
        self.hook = Goodput(self.log, lambda: self.now)
        if state is not None:
            self.hook.load_state_dict(json.loads(json.dumps(state)))

    def wait(self, **seconds):
        """Enter one phase after the other; the first, `start`, is entered already."""
        for phase, duration in seconds.items():
            if phase != "start":
                self.hook.phase(phase)
            self.now += duration

    def seconds(self):
        found = flatten_stats(self.hook.measure())
        whole = found["time/run"]
        assert sum(found[f"goodput/{cause}"] for cause in CAUSES) == pytest.approx(1.0)
        return {cause: pytest.approx(share * whole) for cause in CAUSES if (share := found[f"goodput/{cause}"])}

    def record(self, step):
        self.log.append({"step": step, **flatten_stats(self.hook.measure())})


STEP = {"rollout": 3.0, "train": 5.0, "sync": 1.0, "hooks": 0.5}


def test_every_second_has_one_cause(tmp_path):
    this = Run(tmp_path / "metrics.jsonl")
    this.wait(start=10.0, sync=2.0, hooks=1.0, evaluate=4.0)
    this.wait(**STEP)
    this.wait(save=7.0)
    this.wait(**STEP)
    assert this.seconds() == {
        "start": 10.0,
        "rollout": 6.0,
        "trained": 10.0,
        "sync": 4.0,
        "hooks": 2.0,
        "evaluation": 4.0,
        "checkpoint": 7.0,
    }


def test_a_step_that_was_refused_is_for_nothing(tmp_path):
    this = Run(tmp_path / "metrics.jsonl")
    this.wait(rollout=3.0, train=5.0)  # no sync: the next step begins, or the run ends
    assert this.seconds() == {"redone": 8.0}
    this.wait(rollout=1.0, train=2.0, sync=0.5)
    assert this.seconds() == {"redone": 8.0, "rollout": 1.0, "trained": 2.0, "sync": 0.5}


def test_steps_that_are_rolled_back_are_for_nothing(tmp_path):
    this = Run(tmp_path / "metrics.jsonl")
    this.wait(start=1.0, **STEP)
    state = this.hook.state_dict()
    this.wait(**STEP)
    this.wait(rollout=3.0, train=5.0)
    this.hook.after_rewind(json.loads(json.dumps(state)), repeat=False)
    this.now += 2.0  # the checkpoint is written again
    this.wait(rollout=1.0, train=1.0, sync=0.0)
    expected = {"start": 1.0, "rollout": 4.0, "trained": 6.0, "sync": 1.0, "hooks": 0.5, "redone": 9.5 + 8.0 + 2.0}
    assert this.seconds() == expected


def test_a_run_that_goes_on_counts_what_it_does_again_but_not_the_time_between(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = Run(path)
    first.wait(start=10.0, **STEP)
    state = first.hook.state_dict()
    first.record(1)
    first.wait(**STEP)
    first.record(2)  # then it is killed
    second = Run(path, state)
    second.log.cut(1)
    second.now += 30.0
    assert second.seconds() == {"start": 40.0, "rollout": 3.0, "trained": 5.0, "sync": 1.0, "hooks": 0.5, "redone": 9.5}
    second.wait(**STEP)
    second.record(2)  # and killed again, before a checkpoint
    third = Run(path, state)
    assert third.seconds()["redone"] == 9.5 + 30.0 + 9.5
    unhurt = Run(path.with_name("other.jsonl"), state)
    assert unhurt.seconds() == {"start": 10.0, "rollout": 3.0, "trained": 5.0, "sync": 1.0, "hooks": 0.5}


def test_dropped_tokens_are_shares_of_those_generated(tmp_path):
    this = Run(tmp_path / "metrics.jsonl")
    engine = SimpleNamespace(config=SimpleNamespace(runtime=SimpleNamespace(samples_per_prompt=4)))
    stats = {
        "tokens/generated": Total(700.0),
        "filter/dropped_tokens": Total(100.0),
        "rollout/given_up_tokens": Total(200.0),
        "rollout/cut_tokens": Total(100.0),
        "rollout/expired": Total(2.0),
        "tokens/response": Stat(50.0, 4.0),
    }
    this.hook.after_step(engine, stats, None)
    named = {name: metric.value for name, metric in stats.items() if name.startswith("tokens_dropped/")}
    assert named == {
        "tokens_dropped/filter": 0.1,
        "tokens_dropped/given_up": 0.2,
        "tokens_dropped/cut": 0.1,
        "tokens_dropped/expired": 0.1,
    }
    state = this.hook.state_dict()
    this.hook.after_step(engine, {"tokens/generated": Total(1000.0)}, None)
    assert this.hook.measure()["tokens_dropped/filter"].value == 0.05
    this.hook.after_rewind(state, repeat=False)  # only steps that stand count
    assert this.hook.measure()["tokens_dropped/filter"].value == 0.1


def test_records_of_an_earlier_run_do_not_count(tmp_path):
    with open(tmp_path / "metrics.jsonl", "w") as file:
        file.write('{"step": 1, "time/run": 50.0}\n{"step": 2, "time/run": 60.0}\nhalf a li')
    folder = RunFolder(tmp_path)
    assert folder.metrics.find_maximum("time/run") == 60.0
    folder.cut(1)
    assert folder.metrics.find_maximum("time/run") == 60.0
    folder.move_records_aside()
    assert folder.metrics.find_maximum("time/run") == 0.0
    folder.close()


def test_a_run_reports_where_its_time_went(tmp_path, capsys):
    config = settings(tmp_path, "grpo", save_every=2)
    begun = time.monotonic()
    assert run(config) == 0
    whole = time.monotonic() - begun
    lines = [line for line in metrics(config) if "time/step" in line]
    for line in lines:
        shares = {name: value for name, value in line.items() if name.startswith("goodput/")}
        assert sum(shares.values()) == pytest.approx(1.0) and all(value >= 0.0 for value in shares.values())
        assert line["goodput/redone"] == 0.0
    last = lines[-1]
    assert {cause for cause in CAUSES if last[f"goodput/{cause}"]} == {*CAUSES} - {"redone", "restart"}
    assert sum(line["time/train"] for line in lines) == pytest.approx(
        last["goodput/trained"] * last["time/run"],
        rel=0.25,  # a busy machine may stop the loop in between
    )
    assert lines[0]["time/run"] < last["time/run"] <= whole
    out = capsys.readouterr().out
    assert "went into tokens that were trained on" in out and "waiting for rollouts" in out
