"""Pure functions on columns: what they receive, what becomes of their result, what is refused."""

from __future__ import annotations

import os

import pytest
import torch

from coalign.cluster.apply import apply_columns, merge_columns
from coalign.data.batch import Batch
from coalign.types import Stat, Status, Total


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
    assert future.label == "centre"


def test_on_ray_it_runs_in_another_process(cluster, prompts):
    pid = int(cluster.apply(process, prompts).stats["pid"].value)
    assert (pid == os.getpid()) == cluster.store.in_process


def test_rows_in_error_are_dropped_and_counted(prompts):
    status = torch.tensor([0, 2, 1, 0, 2, 0, 0], dtype=torch.uint8)
    out, stats = apply_columns(optional, [prompts.with_(status=status)], {})
    assert [row["id"] for row in out["rows"]] == [0, 2, 3, 5, 6]
    assert (out["status"] != Status.ERROR).all()
    assert stats == {"samples/dropped": Total(2), "segments": Total(5)}


def test_optional_columns_and_derived_ones(prompts):
    out, _ = apply_columns(optional, [prompts], {})
    assert not out["had_values"].any()
    out, _ = apply_columns(optional, [prompts.with_(values=torch.zeros(22))], {})
    assert out["had_values"].all()


def test_a_missing_column_is_named_with_the_function_and_what_there_is(prompts):
    with pytest.raises(
        ValueError, match="centre needs the column 'reward', which nobody produced; there are: group, rows, tokens"
    ):
        apply_columns(centre, [prompts], {})


def test_different_sequences_are_refused(prompts):
    with pytest.raises(ValueError, match="same sequences: the first has 7 with 22 tokens, number 2 has 3 with 8"):
        merge_columns([prompts, prompts.slice(0, 3)])


def test_a_result_of_another_kind_is_refused(prompts):
    with pytest.raises(ValueError, match="wrong returned 'advantages' of type int; expected tensors or lists"):
        apply_columns(wrong, [prompts], {})
    with pytest.raises(ValueError, match="count returned a int; expected a dict"):
        apply_columns(count, [prompts], {})


def test_a_later_column_replaces_an_earlier_one(prompts):
    merged = merge_columns([prompts, Batch(prompts.lengths).with_(tokens=prompts["tokens"] * 0)])
    assert not merged["tokens"].any() and "group" in merged


def test_what_is_no_batch_is_refused(make_local, prompts):
    cluster = make_local({"judge": {"module": "SumModule"}})
    with pytest.raises(TypeError, match=r"apply\(process, ...\): expected batches, got a int"):
        cluster.apply(process, cluster.models["judge"].whole(prompts)).result()
