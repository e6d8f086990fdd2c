"""Pure functions on columns: what they receive, what becomes of their result, what is refused."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from coalign.cluster.batch_ref import BatchRef, WorkerRows, _PayloadJoin
from coalign.cluster.worker import Worker, apply_columns
from coalign.data.batch import Batch
from coalign.types import Stat, Status, Total
from tests.data.reading import assert_same
from tests.runs import run, settings


def centre(reward, group, *, scale=1.0):
    ids, where = torch.unique(group, return_inverse=True)
    sums = torch.zeros(len(ids)).index_add_(0, where, reward)
    counts = torch.zeros(len(ids)).index_add_(0, where, torch.ones_like(reward))
    return {"advantage": (reward - (sums / counts)[where]) * scale, "reward/mean": Stat.of(reward)}


def optional(tokens, values=None, segment=None):
    return {"had_values": torch.full_like(tokens, values is not None), "segments": Total(int(segment.max()) + 1)}


def process(tokens):
    return {"pid": Total(os.getpid())}


def wrong(tokens):
    return {"advantages": 3}


def count(tokens):
    return len(tokens)


def test_the_same_on_both_clusters(cluster, prompts):
    rewards = cluster.models["judge"].forward_step(prompts)
    future = cluster.apply(centre, prompts, rewards, scale=2.0)
    out = future.result().fetch()
    sums = torch.tensor([float(row["tokens"].sum()) for row in prompts.rows()])
    expected = sums - torch.tensor([sums[:2].mean()] * 2 + [sums[2]] + [sums[3:5].mean()] * 2 + [sums[5], sums[6]])
    assert torch.equal(out["advantage"], expected * 2.0)
    assert set(out.sequence) == {"group", "rows", "reward", "advantage"}
    assert future.stats == {"reward/mean": Stat.of(sums)}
    assert str(future.call) == "centre"
    pid = int(cluster.apply(process, prompts).stats["pid"].value)
    assert (pid == os.getpid()) == cluster.store.in_process


def test_rows_in_error_are_dropped_and_counted(cluster, prompts):
    status = torch.tensor([0, 2, 1, 0, 2, 0, 0], dtype=torch.uint8)
    future = cluster.apply(optional, prompts.with_(status=status))
    for out in (future.result().fetch(), cluster.join(prompts.with_(status=status)).result().fetch()):
        assert [row["id"] for row in out["rows"]] == [0, 2, 3, 5, 6]
        assert (out["status"] != Status.ERROR).all()
    assert future.stats == {"samples/dropped": Total(2), "segments": Total(5)}
    judged = Batch(prompts.lengths).with_(status=status)  # by a model, after the samples were made
    join = cluster.join(prompts.with_(status=torch.zeros(7, dtype=torch.uint8)), judged)
    assert len(join.result()) == 5 and join.stats == {"samples/dropped": Total(2)}


def test_optional_columns_and_derived_ones(prompts):
    columns, _ = apply_columns(optional, prompts, {})
    assert not columns["had_values"].any()
    columns, _ = apply_columns(optional, prompts.with_(values=torch.zeros(22)), {})
    assert columns["had_values"].all()


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (
            lambda prompts: apply_columns(centre, prompts, {}),
            "centre needs the column 'reward', which nobody produced; there are: group, rows, tokens",
        ),
        (
            lambda prompts: Batch.merge([prompts, prompts.slice(0, 3)]),
            "same sequences: the first has 7 with 22 tokens, number 2 has 3 with 8",
        ),
        (
            lambda prompts: apply_columns(wrong, prompts, {}),
            "wrong returned 'advantages' of type int; expected tensors or lists",
        ),
        (lambda prompts: apply_columns(count, prompts, {}), "count returned a int; expected a dict"),
    ],
    ids=["column", "sequences", "value", "result"],
)
def test_what_does_not_fit_is_refused_by_name(prompts, ask, message):
    with pytest.raises(ValueError, match=message):
        ask(prompts)


def test_a_later_column_replaces_an_earlier_one(prompts):
    merged = Batch.merge([prompts, Batch(prompts.lengths).with_(tokens=prompts["tokens"] * 0)])
    assert not merged["tokens"].any() and "group" in merged
    merged = Batch.merge([prompts.with_(mark=torch.zeros(22)), Batch(prompts.lengths).with_(mark=torch.ones(7))])
    assert "mark" not in merged.token and merged["mark"].tolist() == [1.0] * 7  # a column of sequences now


# ---- nothing is stored twice


def stored_payloads(ref: BatchRef | WorkerRows) -> list[object]:
    """What a reference needs of the store."""
    found = []
    for payload in ref.payloads:
        joined = isinstance(payload, _PayloadJoin)
        found += [each for share in payload.sources for each in stored_payloads(share)] if joined else [payload]
    return found


def test_a_function_that_only_measures_stores_nothing(cluster, prompts):
    given = cluster.put(prompts)
    assert cluster.apply(process, given).result() is given


def test_a_function_stores_its_own_columns_alone(cluster, prompts):
    given = cluster.put(prompts.with_(reward=torch.arange(7.0)))
    out = cluster.apply(centre, given).result()
    kept, made = stored_payloads(out)
    assert kept is given.payloads[0]
    made = cluster.store.rows(made, np.arange(7))
    assert {**made.token, **made.sequence}.keys() == {"advantage"}
    assert set(out.columns) == {"tokens", "group", "rows", "reward", "advantage"}


def test_a_join_stores_nothing_and_waits_for_no_worker(cluster, prompts, monkeypatch):
    given = cluster.put(prompts)
    scores = cluster.models["judge"].forward_step(given).result()
    monkeypatch.setattr(cluster, "_function_worker", lambda: pytest.fail("a worker was called"))
    out = cluster.join(given, scores).result()
    assert stored_payloads(out) == [*given.payloads, *scores.payloads]
    expected = Batch.merge([prompts, scores.fetch()])
    assert_same(out.fetch(), expected)
    assert cluster.join(given).result() is given


def test_rows_of_a_join_are_those_of_its_columns(cluster, prompts):
    scores = cluster.models["judge"].forward_step(prompts).result()
    base = BatchRef.concat([cluster.put(prompts.slice(3, 7)), cluster.put(prompts.slice(0, 3))])  # two payloads
    join = BatchRef.join([base, scores.select(torch.tensor([3, 4, 5, 6, 0, 1, 2]))])
    join = BatchRef.join([join, cluster.put(Batch(join.lengths).with_(mark=torch.arange(7)))])  # a join of a join
    rows = torch.tensor([6, 0, 3, 1])
    expected = Batch.merge([prompts, scores.fetch()]).select([3, 4, 5, 6, 0, 1, 2]).with_(mark=torch.arange(7))
    assert_same(join.fetch(), expected)
    assert_same(join.select(rows).fetch(), expected.select(rows))
    assert len(join.slice(0, 0).fetch()) == 0 and "mark" in join.slice(0, 0).fetch()
    stored_anew = cluster.put(expected.slice(0, 2))  # as after a restart
    both = BatchRef.concat([join.slice(2, 7), stored_anew])
    assert_same(both.fetch(), expected.select([2, 3, 4, 5, 6, 0, 1]))
    tokens = int(prompts.lengths[[5, 3]].sum())
    assert cluster.models["judge"].whole(both.select(torch.tensor([0, 5]))).result() == tokens


def test_a_step_stores_each_column_once(tmp_path, monkeypatch):
    """Of a whole run: no function's answer holds what came in, and those that measure hold nothing."""
    stored: dict[str, set[str]] = {}
    execute = Worker.execute

    def watched(self, verb, *arguments):
        meta, payload = execute(self, verb, *arguments)
        if verb == "apply":
            columns = set() if payload is None else {*payload.token, *payload.sequence}
            stored.setdefault(arguments[0].__name__, set()).update(columns)
        return meta, payload

    monkeypatch.setattr(Worker, "execute", watched)
    assert run(settings(tmp_path, "ppo", steps=1)) == 0
    assert stored == {
        "count": set(),
        "describe": set(),
        "score": set(),
        "shape_reward": {"token_rewards"},
        "gae": {"advantages", "returns"},
    }


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda cluster, judge, rows: cluster.apply(process, judge.whole(rows)), r"apply\(process, .* got a int"),
        (lambda cluster, judge, rows: judge.compare(rows, rows.slice(0, 2)), r"judge.compare: .* \[2, 7\] sequences"),
    ],
    ids=["number", "lengths"],
)
def test_what_is_no_batch_is_refused(make_local, prompts, ask, message):
    cluster = make_local({"judge": {"module": "SumModule"}})
    with pytest.raises((TypeError, ValueError), match=message):
        ask(cluster, cluster.models["judge"], prompts).result()
