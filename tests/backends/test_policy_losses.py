"""The policy losses through a model: no cut, no packing and no masked row may change a gradient."""

from collections import Counter

import pytest
import torch

from coalign.algorithms.losses.policy import CISPOLoss
from coalign.algorithms.objective import Objective
from coalign.algorithms.shaping import mask_truncated
from coalign.backends.base import build_objective
from coalign.backends.hf.fsdp import FSDPModule
from coalign.config.schema import LossConfig, ModelConfig
from coalign.data.batch import Batch
from coalign.roles import Context
from coalign.types import Status
from tests.backends.batches import rollout

GSPO = {"fn": "gspo", "aggregation": "sequence_mean_token_mean"}
WEIGHED = {"is_level": "sequence", "is_mode": "mask", "is_low": 0.2, "is_high": 5.0}
CONSTANT = {"aggregation": "constant", "constant_length": 8}
LOSSES = {
    "gspo": GSPO | {"clip_low": 0.1, "clip_high": 0.1},
    "gspo-token": GSPO | {"form": "token", "clip_low": 0.1, "clip_high": 0.1, "is_level": "token", "is_high": 3.0},
    "gspo-weighed": GSPO | WEIGHED | {"clip_high": 0.5},
    "luspo": GSPO | {"aggregation": "sequence_mean_token_sum"},
    "cispo": {"fn": "cispo", "is_level": "token"},
    "sapo": {"fn": "sapo", "aggregation": "sequence_mean_token_mean"},
    "gmpo": {"fn": "gmpo", "aggregation": "sequence_mean_token_mean", "clip_low": 0.1, "clip_high": 0.1},
    "topr": {"fn": "topr", "aggregation": "sequence_mean_token_sum"},
    "reinforce": {"fn": "reinforce"},
    "kl_cov": {"fn": "kl_cov", "is_level": "token"},
    "decoupled": {"fn": "policy_gradient", "is_level": "product", "is_high": 4.0, **CONSTANT},
}

SLOW = pytest.mark.slow
QUICK = ("gspo-weighed", "kl_cov", "decoupled")  # weights by sequence, by token, by their product


class Watched(FSDPModule):
    """Keeps the gradient of its last update."""

    def optimizer_step(self) -> float:
        self.gradient = torch.cat([p.grad.flatten() for p in self.model.parameters()]).double()
        return super().optimizer_step()

    def run(self, micros, loss=None, *, needs=()):
        self.row_counts = sum(len(micro) for micro in micros)
        return super().run(micros, loss, needs=needs)


def module(path: str, loss: dict, **config) -> Watched:
    context = Context(model="trainer", steps=4, loss=build_objective(LossConfig(**loss)))
    made = Watched(ModelConfig(load=path, optimizer={"lr": 1e-2}, **config), context)
    made.setup()
    return made


@pytest.fixture(scope="module")
def batch(path) -> Batch:
    """The sampler and the policy before the update are near to the model, each in its own way."""
    drawn = rollout((5, 9, 12), 4)
    now = module(path, LOSSES["cispo"]).forward_step(drawn)["ref_logprobs"]
    noise = torch.randn(2, drawn.tokens_total, generator=torch.Generator().manual_seed(1))
    near = {"rollout_logprobs": now + 0.3 * noise[0], "old_logprobs": now + 0.1 * noise[1]}
    return drawn.with_(**near, high_covariance=noise[0] > 0.5)


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    "config",
    [
        {"max_tokens_per_micro": 21, "share_prefix": False},
        pytest.param({"max_tokens_per_micro": 60}, marks=pytest.mark.slow),
    ],
)
def test_gradients_and_statistics_do_not_depend_on_cuts_or_packing(path, batch, name, config):
    whole, cut = (module(path, LOSSES[name], **c) for c in ({"share_prefix": False}, config))
    expected, got = whole.train_step(batch), cut.train_step(batch)
    assert apart(cut.gradient, whole.gradient) < 1e-6
    assert {k: v.value for k, v in got.items()} == pytest.approx({k: v.value for k, v in expected.items()}, rel=1e-4)
    assert 0 < got["loss/ess"].value < 1 and got["loss/mismatch_kl"].value > 0


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LOSSES]
)
def test_truncated_rows_that_are_masked_are_as_good_as_gone(path, batch, name):
    status = torch.full((len(batch),), int(Status.OK), dtype=torch.uint8)
    status[[2, 3, 7]] = int(Status.TRUNCATED)
    status[8:] = int(Status.TRUNCATED)  # a whole group
    masked = batch.with_(loss_mask=mask_truncated(batch["loss_mask"], status, batch.segment)["loss_mask"])
    a, b = module(path, LOSSES[name]), module(path, LOSSES[name])
    expected, got = a.train_step(batch.select(status == int(Status.OK))), b.train_step(masked)
    assert apart(b.gradient, a.gradient) < 1e-6
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

    trainer = module(path, LOSSES["cispo"], max_tokens_per_micro=60)
    trainer.train_step(batch, ptx=batch)
    count(Objective, "__init__")
    count(CISPOLoss, "__init__")
    trainer.train_step(batch, ptx=batch)
    trainer.eval_step(batch)
    assert not counts


def test_the_entropy_is_measured_without_a_part_in_the_gradient(path, batch):
    plain, measured = module(path, GSPO), module(path, GSPO | {"measure_entropy": True})
    assert "loss/entropy" not in plain.train_step(batch)
    assert 0 < measured.train_step(batch)["loss/entropy"].value < 6  # at most ln 259
    assert apart(measured.gradient, plain.gradient) < 1e-6


def test_another_mean_than_gspos_is_refused(path):
    with pytest.raises(ValueError, match=r"loss\.aggregation is `token_mean`, which `gspo` is not defined for"):
        module(path, {"fn": "gspo"})
