"""Shares that take equally long, and results in the order of the batch whoever computed them."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coalign.backends.packing import pack
from coalign.cluster.batch_ref import BatchRef, Meta
from coalign.cluster.batch_shards import _shard_updates, reorder, shard_rows
from coalign.cluster.future import Outcome
from coalign.cluster.local import LocalStore
from coalign.cluster.ray.store import NumpyBatch
from coalign.data.batch import Batch, estimate_costs
from tests.cluster.threads import store_batch


def batch(lengths, group=None, work=None) -> BatchRef:
    made = Batch(torch.tensor(lengths, dtype=torch.int64))
    made = made.with_(tokens=torch.arange(made.tokens_total, dtype=torch.int32), rows=list(range(len(lengths))))
    made = made.with_(group=torch.tensor(range(len(lengths)) if group is None else group, dtype=torch.int64))
    return store_batch(made if work is None else made.with_(expected_tokens=torch.tensor(work, dtype=torch.int32)))


def rows(ref, parts, by, **options):
    return [part.tolist() for part in shard_rows(ref, parts, by, **options).rows]


def test_by_cost_groups_stay_whole():
    # Groups of 4, 4, 6, 2 and 6 tokens.
    ref = batch([3, 1, 4, 1, 5, 2, 6], group=[0, 0, 1, 2, 2, 3, 4])
    assert sorted(sum(ref.lengths[part].tolist()) for part in shard_rows(ref, 2, "cost").rows) == [10, 12]
    for part in rows(ref, 2, "cost"):
        assert part == sorted(part) and (0 in part) == (1 in part) and (3 in part) == (4 in part)


def test_a_long_sequence_costs_more_than_its_tokens():
    long = 24576  # twice the cost of as many tokens in short ones
    lengths = [long, *[64] * (long // 64), *[64] * (long // 64)]
    [first, second] = shard_rows(batch(lengths), 2, "cost").rows
    assert first.tolist() == [0] or len(first) < 10
    assert len(second) > 2 * long // 64 - 10


def test_by_work_the_longest_come_first():
    shards = rows(batch([1] * 5, work=[2, 9, 3, 4, 5]), 2, "work")
    assert sorted(row for part in shards for row in part) == list(range(5))
    work = torch.tensor([2, 9, 3, 4, 5])
    assert sorted(int(work[part].sum()) for part in shards) == [11, 12]
    assert all(work[part].tolist() == sorted(work[part].tolist(), reverse=True) for part in shards)
    assert rows(batch([1] * 3, work=[1, 3, 2]), 1, "work") == [[1, 2, 0]]


def test_prompts_of_which_nothing_is_known_stay_in_order():
    assert rows(batch([9, 1, 1, 1]), 2, "work") == [[0, 1], [2, 3]]


def test_samples_of_a_prompt_together_or_spread():
    ref = batch([1] * 4, group=[7, 7, 7, 7], work=[5, 5, 5, 5])
    assert [len(part) for part in rows(ref, 2, "work")] == [4, 0]
    assert [len(part) for part in rows(ref, 2, "work", keep_groups=False)] == [2, 2]


def test_by_order_neighbours_stay_neighbours():
    assert rows(batch([5, 1, 1, 5]), 2, "order") == [[0, 1], [2, 3]]


def test_an_empty_batch():
    assert rows(batch([]), 3, "cost") == [[], [], []]


def scored(part: BatchRef) -> BatchRef:
    """A row of its own for each row: what a scorer gives."""
    given_rows = part.fetch()
    return store_batch(Batch(given_rows.lengths).with_(score=[10 * n for n in given_rows["rows"]]))


def generated(part: BatchRef, samples: int) -> BatchRef:
    """``samples`` rows of each prompt, in the order of the prompts."""
    prompts = part.fetch()
    each = torch.arange(len(prompts)).repeat_interleave(samples)
    return store_batch(prompts.select(each).with_(index=torch.arange(samples).repeat(len(prompts)).int()))


def meta(ref: BatchRef) -> Meta:
    return Meta.of(ref.fetch())


def restored(shards, results):
    return reorder(Outcome(BatchRef.concat(results), {}), shards.order([meta(ref) for ref in results])).result


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3)), min_size=1, max_size=12), st.integers(1, 5), st.data())
def test_results_have_the_order_of_the_batch(groups, parts, data):
    lengths = [length for length, count in groups for _ in range(count)]
    group = [100 - i for i, (_, count) in enumerate(groups) for _ in range(count)]
    work = data.draw(st.none() | st.lists(st.integers(0, 50), min_size=len(lengths), max_size=len(lengths)))
    ref = batch(lengths, group, work)
    by = data.draw(st.sampled_from(["work", "cost", "order"]))
    shards = shard_rows(ref, parts, by)
    assert sorted(torch.cat(shards.rows).tolist()) == list(range(len(lengths)))
    used = [part for part in shards.batches if len(part)]
    scores = restored(shards, [scored(part) for part in used])
    assert scores.fetch()["score"] == [10 * i for i in range(len(lengths))]
    prompts = batch([1] * len(groups), range(100, 100 - len(groups), -1), [length for length, _ in groups])
    shards = shard_rows(prompts, parts, "work")
    out = restored(shards, [generated(part, 2) for part in shards.batches if len(part)]).fetch()
    assert out["rows"] == [i for i in range(len(groups)) for _ in range(2)]
    assert out["index"].tolist() == [0, 1] * len(groups)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=40), st.integers(1, 6))
def test_no_part_costs_much_more_than_another(lengths, parts):
    costs = estimate_costs(torch.tensor(lengths))
    sums = [float(costs[part].sum()) for part in shard_rows(batch(lengths), parts, "cost").rows]
    assert max(sums) - min(sums) <= float(costs.max()) + 1e-9


def test_a_share_keeps_the_order_of_the_batch():
    """So on one rank the updates of a batch are those of the batch, whatever its rows cost."""
    lengths = [9, 1, 1, 1, 8, 2, 2, 6]
    assert shard_rows(batch(lengths), 1, "cost").rows[0].tolist() == list(range(8))
    for share in shard_rows(batch(lengths), 2, "cost").rows:
        assert share.tolist() == sorted(share.tolist()) and sum(lengths[row] for row in share.tolist()) == 15


@pytest.mark.parametrize("parts", [2, 4])
def test_ranks_take_equally_long_and_micro_batches_are_full(parts):
    """Against neighbours of equal tokens, and one micro-batch after the other filled until the next row is too much."""
    draw = torch.Generator().manual_seed(0)
    waste = Counter()
    for _ in range(16):
        lengths = (8 + 400 * torch.rand(48, generator=draw) ** 3).long()  # few are long
        ref = batch(lengths.tolist())
        for name, by in (("before", "order"), ("after", "cost")):
            shares = [part.fetch() for part in shard_rows(ref, parts, by).batches]
            tokens = [share.tokens_total for share in shares]
            attention = [float(share.lengths.double().square().sum()) for share in shares]
            waste[name, "tokens"] += parts * max(tokens) / sum(tokens) - 1
            waste[name, "attention"] += parts * max(attention) / sum(attention) - 1
            # Ranks go in step, so each has as many micro-batches as the one with the most.
            micros = [share.micro(900) if by == "cost" else _one_after_the_other(share, 900) for share in shares]
            waste[name, "micros"] += parts * max(map(len, micros))
            waste[name, "calls"] += sum(len(pack(micro).blocks) for rank in micros for micro in rank)
    assert waste["after", "calls"] < 0.9 * waste["before", "calls"]
    assert waste["after", "micros"] < waste["before", "micros"]
    assert waste["after", "tokens"] < 0.1 * waste["before", "tokens"]
    assert waste["after", "attention"] < waste["before", "attention"]


def _one_after_the_other(share, room):
    cuts, held = [0], 0
    for row, length in enumerate(share.lengths.tolist()):
        if held + length > room:
            cuts, held = [*cuts, row], 0
        held += length
    return [share.slice(a, b) for a, b in pairwise([*cuts, len(share)])]


def test_selected_rows_come_from_where_they_lie():
    first, second = batch([2, 3, 1]), batch([4, 1])
    both = BatchRef.concat([first, second, first])
    assert len(both.payloads) == 2 and both.which.tolist() == [0, 0, 0, 1, 1, 0, 0, 0]
    some = both.select(torch.tensor([7, 3, 0]))
    assert some.fetch()["tokens"].tolist() == [5, 0, 1, 2, 3, 0, 1]
    assert some.select(torch.tensor([1])).payloads == (second.payloads[0],)
    assert len(some.slice(0, 0).fetch()) == 0 and "tokens" in some.slice(1, 1).fetch()


@pytest.mark.parametrize("chosen", [[0, 1, 2], [1, 2], [2, 0], [1], [], [2, 2, 0]])
def test_rows_of_the_object_store_are_those_of_the_batch(chosen):
    made = Batch(torch.tensor([2, 0, 3])).with_(
        tokens=torch.arange(5, dtype=torch.int32),
        half=torch.arange(10).reshape(5, 2).to(torch.bfloat16),
        score=torch.tensor([0.5, 1.5, 2.5]),
        rows=["a", "b", "c"],
    )
    found = NumpyBatch.of(made).select(np.array(chosen, dtype=np.int64))
    expected = made.select(chosen)
    assert torch.equal(found.lengths, expected.lengths) and found["rows"] == expected["rows"]
    for name in ("tokens", "half", "score"):
        assert torch.equal(found[name], expected[name]) and found[name].dtype == expected[name].dtype


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 3)), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(1, 4),
    st.booleans(),
)
def test_an_update_holds_the_same_rows_on_any_number_of_ranks(groups, updates, parts, whole):
    """Those of Batch.split, as a module cuts that is alone; in the order of the batch, groups in one piece."""
    group = [100 - i for i, (_, count) in enumerate(groups) for _ in range(count)]
    ref = batch([length for length, count in groups for _ in range(count)], group)
    expected = [part["rows"] for part in ref.fetch().split(updates, keep="group")]
    shares = [
        share.gather(LocalStore()) for share in _shard_updates(ref, parts, updates, keep_groups=whole).worker_rows
    ]
    assert all(share["rows"] == sorted(share["rows"]) for share in shares)
    for number, rows_of_update in enumerate(expected):
        mine = [share.select(share["update"] == number) for share in shares]
        assert sorted(row for part in mine for row in part["rows"]) == rows_of_update
        if whole:
            found = [group for part in mine for group in part["group"].unique().tolist()]
            assert len(found) == len(set(found))


def test_every_update_is_split_by_cost():
    """Ranks meet at every one of them, so it is not enough that their shares of the batch are equal."""
    ref = batch([8, 2, 6, 8, 2, 6])
    one, other = _shard_updates(ref, 2, 2).worker_rows
    assert [share.update.tolist() for share in (one, other)] == [[0, 1], [0, 0, 1, 1]]
    assert [share.rows.tolist() for share in (one, other)] == [[0, 3], [1, 2, 4, 5]]
