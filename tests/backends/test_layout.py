import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coalign.backends.packing import Block, get_loss_mask, pack
from coalign.data.batch import Batch
from tests.backends.batches import rollout


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
    assert layout.blocks == (Block(0, (3,)), Block(3, (2, 3), (0, 3)), Block(8, (3,)))
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
    assert all(block.prefix is None for block in layout.blocks)
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


def test_an_empty_response_ends_at_its_prompt():
    batch = Batch(
        torch.tensor([2, 3]),
        {"tokens": torch.tensor([4, 5, 4, 5, 6]), "loss_mask": torch.tensor([0, 0, 0, 0, 1], dtype=torch.bool)},
        {"group": torch.tensor([0, 0]), "prompt_length": torch.tensor([2, 2])},
    )
    layout = pack(batch)
    assert layout.last.tolist() == [1, 2]
    assert layout.blocks == (Block(0, (2,)), Block(2, (1,), (0, 2)))


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


@settings(max_examples=50, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    samples=st.integers(1, 4),
    seed=st.integers(0, 1000),
    share=st.booleans(),
)
def test_every_token_finds_its_past(prompts, samples, seed, share):
    """Following blocks backwards from each predictor spells the sequence up to the trained token."""
    batch = rollout(tuple(prompts), samples, seed=seed)
    layout = pack(batch, share_prefix=share)
    assert sum(sum(b.lengths) for b in layout.blocks) == len(layout.tokens)
    past = {}
    for block in layout.blocks:
        prefix = list(range(*block.prefix)) if block.prefix else []
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
