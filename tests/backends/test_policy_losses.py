"""The policy losses through a model: no cut, no packing and no masked row may change a gradient."""

from collections import Counter

import pytest
import torch

from coalign.algorithms.losses.policy import KLCovLoss
from coalign.algorithms.objective import Objective
from coalign.algorithms.shaping import mask_truncated
from coalign.data.batch import Batch
from coalign.types import Status
from tests.backends.batches import rollout
from tests.backends.test_fsdp import Watched
from tests.backends.test_fsdp import module as build
from tests.conformance.backends import relative

# Weights by sequence, by token, by their product. Cuts of every loss: tests/algorithms/test_policy_family.py.
GSPO = {"fn": "gspo", "aggregation": "sequence_mean_token_mean"}
LOSSES = {
    "gspo": GSPO | {"clip_high": 0.5, "is_level": "sequence", "is_mode": "mask", "is_low": 0.2, "is_high": 5.0},
    "kl_cov": {"fn": "kl_cov", "is_level": "token"},
    "decoupled": {"fn": "policy_gradient", "is_level": "product", "is_high": 4.0}
    | {"aggregation": "constant", "constant_length": 8},
}


def module(path: str, loss: dict, **config) -> Watched:
    return build(path, loss=loss, kind=Watched, **config)


@pytest.fixture(scope="module")
def batch(path) -> Batch:
    """The sampler and the policy before the update are near to the model, each in its own way."""
    drawn = rollout((5, 9, 12), 4)
    now = module(path, LOSSES["kl_cov"]).forward_step(drawn)["ref_logprobs"]
    noise = torch.randn(2, drawn.tokens_total, generator=torch.Generator().manual_seed(1))
    near = {"rollout_logprobs": now + 0.3 * noise[0], "old_logprobs": now + 0.1 * noise[1]}
    return drawn.with_(**near, high_covariance=noise[0] > 0.5)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_and_statistics_do_not_depend_on_cuts_or_packing(path, batch, name):
    configs = ({"share_prefix": False}, {"max_tokens_per_micro": 21, "share_prefix": False})
    whole, cut = (module(path, LOSSES[name], **config) for config in configs)
    expected, got = whole.train_step(batch), cut.train_step(batch)
    assert relative(cut.gradient, whole.gradient) < 1e-6
    assert {k: v.value for k, v in got.items()} == pytest.approx({k: v.value for k, v in expected.items()}, rel=1e-4)
    assert 0 < got["loss/ess"].value < 1 and got["loss/mismatch_kl"].value > 0


@pytest.mark.parametrize("name", LOSSES)
def test_truncated_rows_that_are_masked_are_as_good_as_gone(path, batch, name):
    status = torch.full((len(batch),), int(Status.OK), dtype=torch.uint8)
    status[[2, 3, 7]] = int(Status.TRUNCATED)
    status[8:] = int(Status.TRUNCATED)  # a whole group
    masked = batch.with_(loss_mask=mask_truncated(batch["loss_mask"], status, batch.segment)["loss_mask"])
    a, b = module(path, LOSSES[name]), module(path, LOSSES[name])
    expected, got = a.train_step(batch.select(status == int(Status.OK))), b.train_step(masked)
    assert relative(b.gradient, a.gradient) < 1e-6
    assert a.row_counts == b.row_counts == 5  # nor do they cost anything
    assert {k: v.value for k, v in got.items()} == pytest.approx({k: v.value for k, v in expected.items()}, rel=1e-4)


def test_the_loss_is_bound_once_for_all_steps(path, batch, monkeypatch):
    counts = Counter()

    def count(owner, name):
        original = getattr(owner, name)

        def counted(*arguments, **keywords):
            counts[f"{owner.__name__}.{name}"] += 1
            return original(*arguments, **keywords)

        monkeypatch.setattr(owner, name, counted)

    trainer = module(path, LOSSES["kl_cov"], max_tokens_per_micro=60)
    trainer.train_step(batch, ptx=batch)
    count(Objective, "__init__")
    count(KLCovLoss, "__init__")
    trainer.train_step(batch, ptx=batch)
    trainer.eval_step(batch)
    assert not counts


def test_the_entropy_is_measured_without_a_part_in_the_gradient(path, batch):
    plain, measured = module(path, GSPO), module(path, GSPO | {"measure_entropy": True})
    assert "loss/entropy" not in plain.train_step(batch)
    assert 0 < measured.train_step(batch)["loss/entropy"].value < 6  # at most ln 259
    assert relative(measured.gradient, plain.gradient) < 1e-6
