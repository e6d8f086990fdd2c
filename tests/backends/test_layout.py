import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coalign.backends.packing import Block, Layout, get_loss_mask, pack
from coalign.data.batch import Batch
from coalign.types import ImageSpan
from tests.backends.batches import branched, rollout


def example() -> Batch:
    # [1 2 3 | 4 5] [1 2 3 | 6 7 8] [9 9 | 1]
    return Batch(
        torch.tensor([5, 6, 3]),
        {
            "tokens": torch.tensor([1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 8, 9, 9, 1]),
            "loss_mask": torch.tensor([0, 0, 0, 1, 1, 0, 0, 0, 1, 0, 1, 0, 0, 1], dtype=torch.bool),
        },
        {"group": torch.tensor([7, 7, 8]), "prompt_length": torch.tensor([3, 3, 2])},
    )


def test_a_group_lays_its_prompt_down_once():
    layout = pack(example())
    assert layout.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 1]
    assert layout.positions.tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 0, 1, 2]
    assert layout.blocks == (Block(0, (3,)), Block(3, (2, 3), ((0, 3),)), Block(8, (3,)))
    # Token 6 opens the second response: the last token of the prompt predicts it.
    assert layout.targets.tolist() == [4, 5, 6, 8, 1]
    assert layout.predictors.tolist() == [2, 3, 2, 6, 9]
    assert layout.segment.tolist() == [0, 0, 1, 1, 2]
    assert layout.last.tolist() == [4, 7, 10]


def test_without_sharing_the_row_is_the_batch():
    batch = example()
    layout = pack(batch, share_prefix=False)
    assert torch.equal(layout.tokens, batch["tokens"])
    assert layout.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert not any(block.prefix for block in layout.blocks)
    assert layout.predictors.tolist() == [2, 3, 7, 9, 12]
    assert layout.last.tolist() == [4, 10, 13]


@pytest.mark.parametrize(
    "change",
    [
        {"group": torch.tensor([7, 6, 8])},
        {"prompt_length": torch.tensor([3, 2, 2])},
        {"tokens": torch.tensor([1, 2, 3, 4, 5, 1, 0, 3, 6, 7, 8, 9, 9, 1])},
    ],
)
def test_only_equal_prompts_of_one_group_are_shared(change):
    assert len(pack(example().with_(**change)).tokens) == 14


def forks() -> Batch:
    """Rows of an episode that part where tokens differ, whatever was sampled: 4 5 is trained in the first of them."""
    # [1 2 | 4 5 | 3 | 6] [1 2 4 5 3 | 7] [1 2 4 | 8 8] [1 2 4 8 8 | 9], then the next episode [1 2 | 4]
    rows = [[1, 2, 4, 5, 3, 6], [1, 2, 4, 5, 3, 7], [1, 2, 4, 8, 8], [1, 2, 4, 8, 8, 9], [1, 2, 4]]
    trained = [[2, 3, 5], [5], [3, 4], [5], [2]]
    return Batch(
        torch.tensor([len(row) for row in rows]),
        {
            "tokens": torch.tensor([token for row in rows for token in row]),
            "loss_mask": torch.tensor([i in t for row, t in zip(rows, trained, strict=True) for i in range(len(row))]),
        },
        {
            "group": torch.zeros(5).long(),
            "prompt_length": torch.tensor([2] * 5),
            "branch": torch.tensor([0, 1, 2, 3, 0]),
        },
    )


def test_rows_of_an_episode_share_all_that_comes_before_their_fork():
    layout = pack(forks())
    assert layout.tokens.tolist() == [1, 2, 4, 5, 3, 6, 7, 8, 8, 9, 4]
    assert layout.positions.tolist() == [0, 1, 2, 3, 4, 5, 5, 3, 4, 5, 2]
    prompt, first, second, third = (0, 2), (2, 3), (3, 5), (7, 9)
    assert layout.blocks == (
        Block(0, (2,)),
        Block(2, (1,), (prompt,)),
        Block(3, (2,), (prompt, first)),
        Block(5, (1, 1), (prompt, first, second)),
        Block(7, (2,), (prompt, first)),
        Block(9, (1,), (prompt, first, third)),
        Block(10, (1,), (prompt,)),  # the next episode shares the prompt alone, though its first token is the same
    )
    assert layout.copies.tolist() == [5, 5, 4, 2, 2, 1, 1, 2, 2, 1, 1]
    assert layout.targets.tolist() == [4, 5, 6, 7, 8, 8, 9, 4]  # once each
    assert layout.predictors.tolist() == [1, 2, 4, 4, 2, 7, 8, 1]
    assert layout.last.tolist() == [5, 6, 8, 9, 10]


def test_a_token_of_several_rows_has_the_experts_of_the_first():
    batch = forks()
    layout = pack(batch.with_(routed_experts=batch.segment.to(torch.int16).view(-1, 1, 1)))
    assert layout.experts.flatten().tolist() == [0, 0, 0, 0, 0, 0, 1, 2, 2, 3, 4]


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        ([("a", 1, 2), ("b", 3, 2)], [("a", 1, 2), ("b", 3, 2)], 6),
        ([("a", 1, 1), ("b", 3, 2)], [("a", 1, 1), ("c", 3, 2)], 3),  # another image of the same size
        ([("a", 1, 2), ("b", 3, 2)], [("a", 1, 2), ("c", 3, 2)], 1),  # which the one beside it may have seen
        ([("a", 1, 2)], [("a", 1, 2), ("b", 3, 2)], 1),
        ([("b", 4, 3)], [("b", 4, 3)], 4),  # the last token of both is of an image, and differs
    ],
)
def test_rows_part_before_images_that_differ(first, second, shared):
    columns = {"group": torch.tensor([0, 0]), "prompt_length": torch.tensor([1, 1]), "branch": torch.tensor([0, 1])}
    images = [tuple(ImageSpan(name, "", at, size, (1, 2, 2)) for name, at, size in row) for row in (first, second)]
    tokens = torch.tensor([1, 2, 2, 2, 2, 5, 6, 1, 2, 2, 2, 2, 5, 7])
    layout = pack(Batch(torch.tensor([7, 7]), {"tokens": tokens}, {**columns, "images": images}))
    assert len(layout.tokens) == 14 - shared
    repeated = [span for span in images[1] if span.start < shared]
    assert len(layout.images) == len(first) + len(second) - len(repeated)


def test_an_empty_response_ends_at_its_prompt():
    batch = Batch(
        torch.tensor([2, 3]),
        {"tokens": torch.tensor([4, 5, 4, 5, 6]), "loss_mask": torch.tensor([0, 0, 0, 0, 1], dtype=torch.bool)},
        {"group": torch.tensor([0, 0]), "prompt_length": torch.tensor([2, 2])},
    )
    layout = pack(batch)
    assert layout.last.tolist() == [1, 2]
    assert layout.blocks == (Block(0, (2,)), Block(2, (1,), ((0, 2),)))


def test_spans_of_very_different_lengths_are_not_padded_to_one():
    batch = Batch(torch.tensor([100, 3, 3, 4]), {"tokens": torch.arange(110)})
    assert [b.lengths for b in pack(batch).blocks] == [(100,), (3, 3, 4)]


def test_without_a_mask_every_predicted_token_is_trained():
    batch = Batch(torch.tensor([1, 3]), {"tokens": torch.arange(4)})
    assert get_loss_mask(batch).tolist() == [False, False, True, True]


def test_what_cannot_be_packed_is_refused():
    batch = Batch(torch.tensor([2, 2]), {"tokens": torch.arange(4), "loss_mask": torch.tensor([0, 1, 1, 1]).bool()})
    with pytest.raises(ValueError, match="first token of sequence 1"):
        pack(batch)
    with pytest.raises(ValueError, match="sequence 1 of the batch has no tokens"):
        pack(Batch(torch.tensor([2, 0]), {"tokens": torch.arange(2)}))


def test_an_empty_batch_is_an_empty_row():
    batch = Batch(torch.zeros(0, dtype=torch.int64), {"tokens": torch.zeros(0, dtype=torch.int32)})
    assert len(pack(batch).tokens) == 0 and pack(batch).blocks == ()


def check_pasts(batch: Batch, layout: Layout) -> None:
    """Following blocks backwards from each predictor spells the sequence up to the trained token."""
    assert sum(sum(b.lengths) for b in layout.blocks) == len(layout.tokens)
    past = {}
    for block in layout.blocks:
        prefix = [i for piece in block.prefix for i in range(*piece)]
        start = block.start
        for length in block.lengths:
            for end in range(start, start + length):
                past[end] = [*prefix, *range(start, end + 1)]
            start += length
    where = batch["loss_mask"].nonzero().flatten().tolist()
    for t, predictor, sequence in zip(where, layout.predictors.tolist(), layout.segment.tolist(), strict=True):
        first = int(batch.offsets[sequence])
        assert layout.tokens[past[predictor]].tolist() == batch["tokens"][first:t].tolist()
        assert layout.positions[past[predictor]].tolist() == list(range(t - first))
    assert all(past[position][-1] == position for position in layout.last.tolist())
    reach = layout.plan.reach.tolist()
    assert all(past[q] == [k for k in range(q + 1) if q < reach[k]] for q in past)
    assert layout.plan.positions.tolist() == layout.positions.tolist()


@settings(max_examples=50, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    samples=st.integers(1, 4),
    seed=st.integers(0, 1000),
    share=st.booleans(),
)
def test_every_token_finds_its_past(prompts, samples, seed, share):
    batch = rollout(tuple(prompts), samples, seed=seed)
    check_pasts(batch, pack(batch, share_prefix=share))


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=8), data=st.data())
def test_every_token_of_any_rows_finds_its_past(rows, data):
    """Rows that part and meet again in any order, some within others, some the same."""
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.tensor([token for row in rows for token in row])
    drawn = st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens))
    mask = torch.tensor(data.draw(drawn)) & (torch.cat([torch.arange(len(row)) for row in rows]) > 0)
    columns = {"group": torch.zeros(len(rows)).long(), "prompt_length": torch.ones(len(rows)).int()}
    batch = Batch(lengths, {"tokens": tokens, "loss_mask": mask}, {**columns, "branch": torch.arange(len(rows))})
    layout = pack(batch)
    check_pasts(batch, layout)
    distinct = {tuple(row[:n]) for row in sorted(rows) for n in range(1, len(row) + 1)}
    assert len(layout.tokens) >= len(distinct)
    in_order = batch.select(sorted(range(len(rows)), key=rows.__getitem__)).with_(branch=batch["branch"])
    assert len(pack(in_order).tokens) == len(distinct)


def test_the_tokens_of_branches_are_computed_once():
    batch = branched()
    layout = pack(batch)
    check_pasts(batch, layout)
    assert len(layout.tokens) < 0.7 * batch.tokens_total
