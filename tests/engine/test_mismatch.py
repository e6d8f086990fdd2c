import pytest
import torch

from coalign.data.batch import Batch
from coalign.engine.transforms import mismatch, with_reference_point


def batch(groups, prompts=(2, 1, 3), responses=(1, 2, 1)) -> Batch:
    """Row i: prompt tokens 10·i + 0, 1, …, response tokens 100·i + 0, 1, …"""
    tokens, mask = [], []
    for row, (p, r) in enumerate(zip(prompts, responses, strict=True)):
        tokens += [10 * row + i for i in range(p)] + [100 * (row + 1) + i for i in range(r)]
        mask += [False] * p + [True] * r
    return Batch(
        torch.tensor([p + r for p, r in zip(prompts, responses, strict=True)]),
        {"tokens": torch.tensor(tokens, dtype=torch.int32), "loss_mask": torch.tensor(mask)},
        {"group": torch.tensor(groups), "prompt_length": torch.tensor(prompts, dtype=torch.int32)},
    )


def test_every_prompt_meets_the_response_of_the_next_row():
    out = mismatch(batch([0, 1, 2]))
    assert [row["tokens"].tolist() for row in out.rows()] == [[0, 1, 200, 201], [10, 300], [20, 21, 22, 100]]
    assert [row["loss_mask"].tolist() for row in out.rows()] == [
        [False, False, True, True],
        [False, True],
        [False, False, False, True],
    ]
    assert out["prompt_length"].tolist() == [2, 1, 3]


def test_a_response_to_the_same_prompt_is_no_mismatch():
    """Rows 0 and 1 are two responses of one row of data (paired KTO)."""
    out = mismatch(batch([7, 7, 8]))
    assert [row["tokens"].tolist()[-1] for row in out.rows()] == [300, 300, 100]


def test_a_single_row_has_no_other():
    with pytest.raises(ValueError, match=r"raise runtime\.prompts_per_step"):
        mismatch(batch([7, 7, 7]))


@pytest.mark.parametrize("policy, expected", [([-1.0, -1.0, -2.0, 0.0], 2.0), ([-5.0, -5.0, -5.0, -5.0], 0.0)])
def test_the_reference_point_by_hand(policy, expected):
    """Sums over trained tokens: 0.5 · ((−1 − 1 + 5) + (−2 + 0 + 3)) = 2; a negative mean is 0."""
    mask = torch.tensor([False, True, True, False, True, True])
    column = lambda values: torch.zeros(6).masked_scatter(mask, torch.tensor(values))  # noqa: E731
    others = Batch(
        torch.tensor([3, 3]),
        {"loss_mask": mask, "old_logprobs": column(policy), "ref_logprobs": column([-2.0, -3.0, -1.0, -2.0])},
    )
    out = with_reference_point(batch([0, 1, 2]), others)
    assert out["reference_point"].tolist() == [expected] * 3
