"""Packed columns: no verb loses, reorders or invents a token."""

import pickle
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coalign.data.batch import Batch, split_ranges
from coalign.types import Status
from tests.data.reading import assert_same

settings.register_profile("quick", max_examples=60, deadline=None, derandomize=True)
settings.load_profile("quick")


def make(lengths, groups=None):
    """A batch in which every value says where it came from."""
    total = sum(lengths)
    return Batch(
        torch.tensor(lengths, dtype=torch.int64),
        {"tokens": torch.arange(total, dtype=torch.int32), "hidden": torch.arange(2.0 * total).view(total, 2)},
        {
            "group": torch.tensor(groups if groups is not None else range(len(lengths)), dtype=torch.int64),
            "rows": [{"row": i} for i in range(len(lengths))],
        },
    )


lengths = st.lists(st.integers(0, 9), max_size=14)


@st.composite
def grouped(draw):
    sizes = draw(lengths)
    ids, out = 0, []
    for _ in sizes:
        ids += draw(st.integers(0, 1))
        out.append(ids)
    return make(sizes, out)


@given(grouped(), st.integers(1, 6), st.sampled_from([None, "group"]), st.sampled_from(["tokens", "sequences"]))
def test_split_is_a_partition_in_order_that_keeps_groups(batch, n, keep, by):
    parts = batch.split(n, keep=keep, by=by)
    assert len(parts) == n
    assert_same(Batch.concat(parts), batch)
    if keep:
        seen = [set(p["group"].tolist()) for p in parts]
        assert sum(map(len, seen)) == len(set(batch["group"].tolist()))
    units = len(set(batch["group"].tolist())) if keep else len(batch)
    if units >= n:
        assert all(len(p) for p in parts)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(1, 5))
def test_no_part_exceeds_its_share_by_more_than_the_longest_sequence(sizes, n):
    assert max(p.tokens_total for p in make(sizes).split(n)) <= sum(sizes) / n + max(sizes)


def test_split_balances():
    assert [p.lengths.tolist() for p in make([4, 4, 4, 4, 8, 8]).split(2)] == [[4, 4, 4, 4], [8, 8]]
    assert [p.lengths.tolist() for p in make([9, 1, 1, 1]).split(2, by="sequences")] == [[9, 1], [1, 1]]
    assert split_ranges(torch.tensor([100, 1, 1]), 3) == [(0, 1), (1, 2), (2, 3)]
    assert split_ranges(torch.tensor([1, 1]), 4) == [(0, 1), (1, 1), (1, 2), (2, 2)]
    assert split_ranges(torch.tensor([], dtype=torch.int64), 2) == [(0, 0), (0, 0)]


@given(grouped(), st.integers(9, 30), st.sampled_from([None, "group"]))
def test_micro_keeps_the_budget_and_fitting_groups_in_order(batch, budget, keep):
    numbered = Batch(batch.lengths, batch.token, {**batch.sequence, "row": list(range(len(batch)))})
    micros = numbered.micro(budget, keep=keep)
    assert all(len(m) > 0 and m.tokens_total <= budget for m in micros)
    rows = [row for m in micros for row in m["row"]]
    assert sorted(rows) == list(range(len(batch)))
    if len(batch):
        assert_same(Batch.concat(micros).without("row"), batch.select(rows))
    if keep:
        for group in set(batch["group"].tolist()):
            size = int(batch.lengths[batch["group"] == group].sum())
            where = [row for m in micros for row in m["row"] if batch["group"][row] == group]
            assert size > budget or where == list(range(where[0], where[0] + len(where)))
            assert size > budget or sum(group in m["group"].tolist() for m in micros) == 1


@given(grouped(), st.integers(9, 30))
def test_micro_batches_are_full(batch, budget):
    micros = batch.micro(budget)
    for a, b in pairwise(micros):
        assert a.tokens_total + int(b.lengths[0]) > budget


def test_micro_by_hand():
    assert [m.lengths.tolist() for m in make([4, 4, 6, 6]).micro(10)] == [[6, 4], [6, 4]]
    assert make([2, 7]).micro(None)[0].lengths.tolist() == [2, 7]
    groups = make([2, 3, 5, 1, 9]).with_(group=torch.tensor([0, 0, 1, 2, 2]))
    assert [m.lengths.tolist() for m in groups.micro(10, keep="group")] == [[1, 9], [2, 3, 5]]
    assert [m.lengths.tolist() for m in groups.micro(9, keep="group")] == [[9], [2, 3, 1], [5]]


@given(st.data())
def test_select_takes_whole_sequences_in_the_order_asked_for(data):
    batch = make(data.draw(lengths))
    rows = data.draw(st.lists(st.integers(0, max(len(batch) - 1, 0)), max_size=8)) if len(batch) else []
    picked = batch.select(rows)
    assert len(picked) == len(rows)
    every = list(batch.rows())
    for row, got in zip(rows, picked.rows(), strict=True):
        assert torch.equal(got["tokens"], every[row]["tokens"])
        assert torch.equal(got["hidden"], every[row]["hidden"])
        assert got["rows"] == {"row": row} and int(got["group"]) == row


@given(st.data())
def test_a_mask_selects_like_its_indices(data):
    batch = make(data.draw(lengths))
    mask = data.draw(st.lists(st.booleans(), min_size=len(batch), max_size=len(batch)))
    assert_same(batch.select(torch.tensor(mask, dtype=torch.bool)), batch.select([i for i, m in enumerate(mask) if m]))


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (lambda: make([2, 7]).micro(6), ValueError, r"7 tokens exceeds max_tokens_per_micro=6"),
        *((lambda rows=rows: make([1, 2, 3]).select(rows), IndexError, "") for rows in ([3], [-1], [0, 5])),
        (lambda: make([1, 2, 3]).select(torch.tensor([True, False])), IndexError, ""),
        *((lambda cut=cut: make([1, 2, 3]).slice(*cut), IndexError, "batch of 3") for cut in ((-1, 2), (2, 1), (0, 4))),
        (lambda: Batch(torch.tensor([2, 2]), {"tokens": torch.zeros(3)}), ValueError, "token column 'tokens' has 3"),
        (lambda: Batch(torch.tensor([2, 2]), {}, {"rows": [1]}), ValueError, "sequence column 'rows' has 1"),
        (lambda: Batch(torch.tensor([1]), {"x": torch.zeros(1)}, {"x": [1]}), ValueError, "both"),
        (lambda: Batch(torch.tensor([3, -1])), ValueError, "non-negative"),
        (lambda: make([1])["valeus"], KeyError, r"no column 'valeus'; it has \['group', 'hidden', 'rows', 'tokens'\]"),
        (lambda: make([1, 2]).split(2, keep="grp"), KeyError, "grp"),
        (lambda: make([1, 2]).micro(9, keep="grp"), KeyError, "grp"),
        (lambda: make([2, 3]).with_(own=torch.zeros(4)), ValueError, r"'own' has 4 entries; expected 5 .* or 2"),
        (lambda: make([1, 1]).with_(own=torch.zeros(2)), ValueError, "does not tell its kind"),
        (lambda: make([1]).only("nothing"), KeyError, "nothing"),
        (
            lambda: Batch.concat([make([2]), make([2]).with_(values=torch.zeros(2))]),
            ValueError,
            r"only some of them have the columns \['values'\]",
        ),
    ],
)
def test_what_a_batch_refuses(ask, error, message):
    with pytest.raises(error, match=message):
        ask()


def test_with_reads_the_kind_of_a_column():
    batch = make([2, 3]).with_(values=torch.zeros(5), reward=torch.zeros(2), own=torch.zeros(5, 4), names=["a", "b"])
    assert {"values", "own"} <= set(batch.token) and {"reward", "names"} <= set(batch.sequence)
    one = make([1, 1]).with_(values=torch.zeros(2), reward=torch.zeros(2), **{"reward/math": torch.zeros(2)})
    assert "values" in one.token and {"reward", "reward/math"} <= set(one.sequence)
    assert "own" in make([]).with_(own=torch.zeros(0))


def test_a_batch_does_not_change():
    batch = make([2, 3])
    for change in (
        lambda: batch.token.update(x=1),
        lambda: batch.token.__setitem__("x", torch.zeros(5)),
        lambda: setattr(batch, "lengths", torch.tensor([1])),
    ):
        with pytest.raises((AttributeError, TypeError)):
            change()
    more = batch.with_(values=torch.zeros(5)).without("hidden", "nothing")
    assert "values" not in batch and "hidden" in batch and "hidden" not in more
    assert sorted([*batch.only("tokens", "rows").token, *batch.only("tokens", "rows").sequence]) == ["rows", "tokens"]
    assert len({batch, more, batch}) == 2  # by identity


@given(grouped())
def test_pickling_keeps_everything(batch):
    _ = batch.segment, batch.offsets
    assert_same(pickle.loads(pickle.dumps(batch)), batch)


def test_a_pickled_part_does_not_carry_the_rest():
    part = make([1000] * 100).split(100)[3]
    assert len(pickle.dumps(part)) < 40_000  # 1000 tokens: 4 kB and 8 kB; the whole batch is 1.2 MB
    assert_same(pickle.loads(pickle.dumps(part)), part)


@given(grouped())
def test_segment_and_offsets(batch):
    assert batch.segment.tolist() == [i for i, n in enumerate(batch.lengths.tolist()) for _ in range(n)]
    assert batch.offsets.tolist() == [int(batch.lengths[:i].sum()) for i in range(len(batch) + 1)]
    assert torch.equal(batch["segment"], batch.segment)
    assert batch.get("absent") is None


def test_concat_of_nothing_and_of_different_columns():
    assert len(Batch.concat([])) == 0
    assert_same(Batch.concat([make([]), make([2])]), make([2]))


def test_samples_are_the_rows_of_a_batch():
    mask = torch.tensor([0, 0, 1, 1, 0, 1, 0, 1], dtype=torch.bool)
    batch = Batch(
        torch.tensor([6, 2]),
        {
            "tokens": torch.arange(8, dtype=torch.int32),
            "loss_mask": mask,
            "rollout_logprobs": torch.arange(8.0),
            "versions": torch.tensor([-1, -1, 3, 4, -1, 4, -1, 4], dtype=torch.int32),
        },
        {
            "group": torch.tensor([7, 8]),
            "index": torch.tensor([1, 0], dtype=torch.int32),
            "status": torch.tensor([Status.TRUNCATED, Status.OK], dtype=torch.uint8),
            "reward": torch.tensor([0.0, 1.5]),
            "reward/math": torch.tensor([0.0, 1.0]),
            "rows": [{"answer": 7}, {"answer": 8}],
        },
    )
    first, second = batch.samples()
    assert (first.group, first.index, first.versions, first.reward) == (7, 1, [(3, 1), (4, 2)], 0.0)
    assert (first.rewards, first.status, first.meta) == ({"math": 0.0}, Status.TRUNCATED, {"answer": 7})
    assert torch.equal(first.tokens, torch.arange(6, dtype=torch.int32)) and torch.equal(first.loss_mask, mask[:6])
    assert torch.equal(first.logprobs, torch.arange(6.0))
    assert (second.group, second.index, second.versions, second.reward) == (8, 0, [(4, 1)], 1.5)
    assert (second.rewards, second.status, second.tokens.tolist()) == ({"math": 1.0}, Status.OK, [6, 7])
    unscored = make([2, 1]).with_(loss_mask=torch.tensor([False, False, True]))
    assert [(s.reward, s.versions) for s in unscored.samples()] == [(None, []), (None, [])]
    assert make([]).samples() == []
