"""Losses that compare responses do not depend on how a step is cut into micro-batches."""

import pytest
import torch

from coalign.algorithms import losses
from coalign.algorithms.objective import Objective
from coalign.algorithms.segments import LossTotals
from coalign.backends.base import loss_input
from coalign.data.batch import Batch
from coalign.types import merge_stats
from tests.algorithms.test_preference import WITH_REFERENCE

T = torch.tensor
LOSSES = {
    **{name: {"nll_coef": 0.2} for name in (*WITH_REFERENCE, "simpo", "cpo")},
    **{"orpo": {}, "kto": {}, "apo_zero_unpaired": {}, "bradley_terry": {"centre_coef": 0.01}},
}


@pytest.mark.parametrize("name", LOSSES)
def test_cuts_between_groups_change_nothing(name):
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 6, (9,), generator=generator)
    total = int(lengths.sum())
    preference = T([1.0, 0.0, 2.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0])  # the third group has no pairs
    batch = Batch(
        lengths,
        {
            "tokens": torch.zeros(total, dtype=torch.int32),
            "ref_logprobs": -torch.rand(total, generator=generator, dtype=torch.float64),
        },
        {
            "group": T([3, 3, 8, 8, 8, 1, 1, 2, 2]),
            "preference": preference.clamp(max=1) if "unpaired" in name or name == "kto" else preference,
            "margin": T([0.2, 0.0, 1.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0]),
            "reference_point": torch.full((9,), 0.5),
        },
    )
    output, trained = ("scores", 9) if name == "bradley_terry" else ("logprobs", total - 9)
    values = -torch.rand(trained, generator=generator, dtype=torch.float64)

    def run(parts):
        objective = Objective(getattr(losses, name)(**LOSSES[name]))
        leaf, at, shares, stats = values.clone().requires_grad_(), 0, [], []
        for part in parts:
            size = len(part) if output == "scores" else part.tokens_total - len(part)
            x = loss_input(part, {output: leaf[at : at + size]})
            share, seen = objective(x, LossTotals(total - 9, 9, 4))
            share.backward()
            at, shares, stats = at + size, [*shares, share.item()], [*stats, seen]
        return sum(shares), leaf.grad, {name: stat.value for name, stat in merge_stats(stats).items()}

    whole, cut = run([batch]), run([batch.slice(0, 2), batch.slice(2, 7), batch.slice(7, 9)])
    assert cut[0] == pytest.approx(whole[0], rel=1e-12) and cut[2] == pytest.approx(whole[2])
    torch.testing.assert_close(cut[1], whole[1], rtol=1e-12, atol=0)
