"""What a step looked like: worked out by hand, of real calls, and as files."""

from __future__ import annotations

import json

import pytest

from coalign.cluster.future import Call, Future, Outcome, Span, WorkerTask
from coalign.engine.hooks.timeline import (
    Timeline,
    _build_phase_events,
    _build_trace,
    _CallEvent,
    _compute_idle_shares,
    _list_running_calls,
)
from coalign.report.plots import plot_timeline
from coalign.types import Stat
from tests.cluster.test_stream import sleepy
from tests.cluster.threads import thread_cluster

# Two replicas generate from 10 to 12 and to 14, a judge scores from 14 to 15, after its weights came (13 to 14).
EVENTS = [
    _CallEvent(
        Call("policy", "generate"),
        9.5,
        (Span("policy, replica 0", "call", 10, 2), Span("policy, replica 1", "call", 10, 4)),
    ),
    _CallEvent(
        Call("judge", "forward_step"), 9.5, (Span("judge", "move", 13, 1), Span("judge", "call", 14, 1)), memory=2**20
    ),
]


def test_idle_is_what_is_left_of_the_step():
    shares = _compute_idle_shares(EVENTS, {"policy": 2, "judge": 1, "trainer": 4}, 10.0, 20.0)
    assert shares == {"policy": pytest.approx(0.7), "judge": pytest.approx(0.9), "trainer": 1.0}


def test_a_call_counts_with_its_part_of_the_step():
    assert _compute_idle_shares(EVENTS, {"policy": 2}, 11.0, 13.0) == {
        "policy": pytest.approx(0.25)
    }  # 1 s and 2 s of 2 × 2 s


def test_a_trace_has_a_row_for_each_process_and_says_what_waited():
    trace = _build_trace(EVENTS, 10.0, 20.0)["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace if e["ph"] == "M"}
    assert names == {(1, 0): "policy", (1, 1): "replica 0", (1, 2): "replica 1", (2, 0): "judge", (2, 1): "judge"}
    drawn = [(e["name"], e["pid"], e["tid"], e["ts"], e["dur"]) for e in trace if e["ph"] == "X"]
    assert drawn == [
        ("generate", 1, 1, 0, 2_000_000),
        ("generate", 1, 2, 0, 4_000_000),
        ("move", 2, 1, 3_000_000, 1_000_000),
        ("forward_step", 2, 1, 4_000_000, 1_000_000),
    ]
    waited = [(e["name"], e["ph"], e["pid"], e["ts"]) for e in trace if e["ph"] in "be"]
    assert waited == [("forward_step waits", "b", 2, 0), ("forward_step waits", "e", 2, 3_000_000)]
    assert trace[-3]["args"] == {"label": "judge.forward_step", "MiB": 1}


def test_times_outside_of_the_step_are_cut():
    bars = [e for e in _build_trace(EVENTS, 11.0, 14.5)["traceEvents"] if e["ph"] == "X"]
    assert [(bar["ts"], bar["dur"]) for bar in bars] == [
        (0, 1_000_000),
        (0, 3_000_000),
        (2_000_000, 1_000_000),
        (3_000_000, 500_000),
    ]


def test_phases_last_until_the_next_one():
    entered = [(10.0, "rollout"), (14.0, "train"), (19.0, "sync")]
    assert [(str(e.call), e.start, e.stop) for e in _build_phase_events(entered, 20.0)] == [
        ("loop.rollout", 10.0, 14.0),
        ("loop.train", 14.0, 19.0),
        ("loop.sync", 19.0, 20.0),
    ]


def test_calls_under_way_count_until_now():
    future = Future(Call("policy", "generate"))
    done, busy = (WorkerTask(f"policy, replica {i}", Future(Call(None, "")).ended, None, 10.0) for i in range(2))
    done.meta.set_result(Outcome(None, {}))
    future.running = [done, busy]
    [event] = _list_running_calls([future], 13.0)
    assert event.spans == (Span("policy, replica 1", "", 10.0, 3.0),)


def test_three_scorers_side_by_side_are_seen_as_such(tmp_path):
    scorers = {name: {"module": "MeetModule"} for name in ("one", "two", "three")}
    timeline = Timeline(tmp_path, every=1)
    with thread_cluster({"policy": {"module": "SleepyModule"}} | scorers) as cluster:
        cluster.on_end = timeline.note
        timeline.phase("rollout")
        out = cluster.models["policy"].generate(sleepy([0.1]))
        for future in [cluster.models[name].forward_step(out) for name in scorers]:
            future.result()
        stats = {}
        engine = type("Engine", (), {"cluster": cluster, "step": 1})
        timeline.after_step(engine, stats, None)
    assert stats.keys() == {"idle/policy", "idle/one", "idle/two", "idle/three"}
    assert all(isinstance(stat, Stat) and 0.0 < stat.value < 1.0 for stat in stats.values())
    trace = json.loads((tmp_path / "step_1.json").read_text())["traceEvents"]
    bars = [(e["pid"], e["ts"], e["ts"] + e["dur"]) for e in trace if e["name"] == "forward_step" and e["ph"] == "X"]
    assert len({pid for pid, *_ in bars}) == 3 == len(bars)
    assert max(start for _, start, _ in bars) <= min(stop for *_, stop in bars)
    picture = plot_timeline(tmp_path / "step_1.json", tmp_path / "timeline.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
