"""Which tokens Clip-Cov and KL-Cov choose, by hand, and that nothing but the tokens themselves decides it."""

import pytest
import torch

from coalign.algorithms.covariance import _measure_covariance, clip_cov, kl_cov
from coalign.data.batch import Batch

T = torch.tensor
# Two samples of group 3, a prompt token each. Trained: log-probs -1, -3 (A = 2) and -1, -3 (A = -2); means -2 and 0.
# Covariances: (1)(2) = 2, (-1)(2) = -2, (1)(-2) = -2, (-1)(-2) = 2.
GIVEN = {
    "advantages": T([0.0, 2.0, 2.0, 0.0, -2.0, -2.0]),
    "rollout_logprobs": T([0.0, -1.0, -3.0, 0.0, -1.0, -3.0]),
    "loss_mask": T([False, True, True, False, True, True]),
    "segment": T([0, 0, 0, 1, 1, 1]),
    "group": T([3, 3]),
    "index": T([0, 1]),
}


def drawn(seed=0, sequences=24):
    """A rollout of several groups; the log-probs and advantages of no two tokens are equal."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 12, (sequences,), generator=generator)
    total = int(lengths.sum())
    mask = torch.rand(total, generator=generator) < 0.8
    return Batch(lengths).with_(
        advantages=torch.randn(total, generator=generator) * mask,
        rollout_logprobs=-torch.rand(total, generator=generator) * mask,
        loss_mask=mask,
        group=torch.arange(sequences) // 4 + 7,
        index=torch.arange(sequences) % 4,
    )


def chosen(fn, batch, **settings):
    """The (group, index, position) of the tokens that a function chose."""
    columns = {name: batch[name] for name in GIVEN if name != "segment"}
    out = fn(segment=batch.segment, **columns, **settings)
    marks = out["high_covariance"] if fn is kl_cov else (out["advantages"] == 0) & batch["loss_mask"]
    position = torch.arange(batch.tokens_total) - batch.offsets[batch.segment]
    rows = batch.segment[marks]
    return {*zip(batch["group"][rows].tolist(), batch["index"][rows].tolist(), position[marks].tolist(), strict=True)}


def test_the_covariance_worked_by_hand():
    order, covariance = _measure_covariance(
        **{"logprobs" if n == "rollout_logprobs" else n: c for n, c in GIVEN.items()}
    )
    assert order.tolist() == [1, 2, 4, 5]
    assert covariance.tolist() == [2.0, -2.0, -2.0, 2.0] and covariance.dtype == torch.float64


def test_kl_cov_marks_the_highest():
    out = kl_cov(**GIVEN, share=0.5)
    assert out["high_covariance"].nonzero().flatten().tolist() == [1, 5]
    assert out["covariance/mean"].value == 0.0 and out["covariance/chosen"].value == 0.5
    # At least one; of equals the first, of the first sample of the first group, wherever it stands in the batch.
    assert kl_cov(**GIVEN, share=0.0)["high_covariance"].nonzero().flatten().tolist() == [1]
    turned = GIVEN | {"index": T([1, 0])}
    assert kl_cov(**turned, share=0.0)["high_covariance"].nonzero().flatten().tolist() == [5]


def test_clip_cov_takes_some_between_the_bounds():
    out = clip_cov(**GIVEN, share=1.0)
    assert out["advantages"].tolist() == [0, 0, 2, 0, -2, 0]  # both tokens of covariance 2
    assert GIVEN["advantages"].tolist() == [0, 2, 2, 0, -2, -2]  # the input stays as it is
    one = clip_cov(**GIVEN, share=0.25)["advantages"]
    assert one.tolist() in ([0, 0, 2, 0, -2, -2], [0, 2, 2, 0, -2, 0])
    for bounds in ({"low": 2.0, "high": 5.0}, {"low": 1.0, "high": 2.0}):  # both are excluded
        out = clip_cov(**GIVEN, share=1.0, **bounds)
        assert out["advantages"].tolist() == GIVEN["advantages"].tolist() and out["covariance/chosen"].value == 0.0


@pytest.mark.parametrize(
    ("fn", "settings"), [(clip_cov, {"share": 0.05, "low": 0.0, "high": 9.0}), (kl_cov, {"share": 0.1})]
)
def test_the_order_of_arrival_changes_nothing(fn, settings):
    batch = drawn()
    known = chosen(fn, batch, **settings)
    assert len(known) == int(settings["share"] * int(batch["loss_mask"].sum())) > 3
    for seed in range(3):
        order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
        assert chosen(fn, batch.select(order), **settings) == known
    assert chosen(fn, drawn(seed=1), **settings) != known


def test_another_roll_out_draws_others():
    batch, settings = drawn(), {"share": 0.05, "low": 0.0, "high": 9.0}
    later = batch.with_(group=batch["group"] + 100)
    assert {(g - 100, i, p) for g, i, p in chosen(clip_cov, later, **settings)} != chosen(clip_cov, batch, **settings)


@pytest.mark.parametrize("fn", [clip_cov, kl_cov])
def test_nothing_to_choose_from(fn):
    none = {**GIVEN, "loss_mask": torch.zeros(6, dtype=torch.bool)}
    assert {len(c) for c in fn(**none).values() if isinstance(c, torch.Tensor)} == {6}
