from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coalign.algorithms.losses.policy import PolicyGradient
from coalign.algorithms.segments import LossTotals, aggregation_weights
from coalign.types import LossInput

T = torch.tensor
MODES = ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"]


@pytest.mark.parametrize(
    "aggregation, expected",
    [
        # Values 1, 2, 3 in sequence 0, 6 in sequence 2; sequence 1 has no trained token and counts nowhere.
        ("token_mean", (1 + 2 + 3 + 6) / 4),
        ("sequence_mean_token_mean", (2 + 6) / 2),
        ("sequence_mean_token_sum", (6 + 6) / 2),
        ("constant", (6 + 6) / (2 * 8)),
    ],
)
def test_worked_by_hand(aggregation, expected):
    segment = T([0, 0, 0, 2])
    options = {"aggregation": aggregation, "totals": LossTotals(4, 2, 3), "constant_length": 8}
    weights = aggregation_weights(segment, 3, **options)
    assert weights.dtype == torch.float64
    assert (weights * T([1.0, 2.0, 3.0, 6.0])).sum().item() == pytest.approx(expected)
    assert aggregation_weights(segment[:0], 2, **options).shape == (0,)  # without trained tokens


@pytest.mark.parametrize("aggregation", MODES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=8), data=st.data())
def test_loss_and_gradient_do_not_depend_on_cuts_or_order(aggregation, lengths, data):
    """Any order of the sequences, cut anywhere (over micro-batches or ranks), against one micro-batch of all."""
    if not sum(lengths):
        return
    order = data.draw(st.permutations(range(len(lengths))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(lengths)), max_size=3)) | {0, len(lengths)})
    generator = torch.Generator().manual_seed(len(lengths))
    logprobs, old, ref, advantages = torch.randn(4, sum(lengths), generator=generator, dtype=torch.float64) * 0.3
    segment = torch.repeat_interleave(torch.arange(len(lengths)), T(lengths))

    def run(parts):
        leaf = logprobs.clone().requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        for rows in parts:
            where = torch.cat([(segment == r).nonzero().flatten() for r in rows])
            local = torch.cat([torch.full((lengths[r],), i, dtype=torch.int64) for i, r in enumerate(rows)])
            x = LossInput(
                local, len(rows), logprobs=leaf[where], old=old[where], ref=ref[where], advantages=advantages[where]
            )
            totals = LossTotals(len(segment), len(segment.unique()), len(lengths))
            options = {"aggregation": aggregation, "totals": totals, "constant_length": 16}
            weights = aggregation_weights(x.segment, x.sequences, **options)
            total = total + (PolicyGradient(kl_coef=0.04)(x).value * weights).sum()
        return total, torch.autograd.grad(total, leaf)[0]

    parts = [order[a:b] for a, b in pairwise(cuts)]
    torch.testing.assert_close(run(parts), run([range(len(lengths))]), rtol=1e-12, atol=1e-14)
