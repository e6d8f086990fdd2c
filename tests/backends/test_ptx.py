"""Language modelling on other rows, beside the objective of a training step."""

import pytest
import torch

from coalign.data.batch import Batch
from tests.backends.batches import rollout
from tests.backends.test_fsdp import Watched, module, same, weights


def documents(lengths: tuple[int, ...] = (11, 6, 14, 9), seed: int = 7) -> Batch:
    total = sum(lengths)
    tokens = torch.randint(0, 259, (total,), generator=torch.Generator().manual_seed(seed)).int()
    batch = Batch(torch.tensor(lengths)).with_(tokens=tokens, loss_mask=torch.ones(total, dtype=torch.bool))
    mask = torch.ones(total, dtype=torch.bool)
    mask[batch.offsets[: len(lengths)]] = False
    return batch.with_(loss_mask=mask, group=torch.arange(len(lengths)))


def gradient(path: str, batch: Batch, *, loss: str | None = None, config: dict | None = None, **ptx):
    """(the gradient of one step, its statistics)"""
    trainer = module(path, kind=Watched, **config or {})
    stats = trainer.train_step(batch, loss=loss, **ptx)
    return trainer.gradient.double(), stats


def test_the_gradients_add_up(path):
    batch, rows = rollout(), documents()
    own, _ = gradient(path, batch)
    language, stats = gradient(path, rows, loss="sft")
    both, mixed = gradient(path, batch, ptx=rows, ptx_coef=0.3)
    torch.testing.assert_close(both, own + 0.3 * language, rtol=1e-4, atol=1e-7)
    assert mixed["loss/ptx"].value == pytest.approx(stats["loss/value"].value, rel=1e-6)
    assert mixed["tokens/trained"].value == int(batch["loss_mask"].sum())
    nothing, mixed = gradient(path, batch, ptx=rows, ptx_coef=0.0)
    assert torch.equal(nothing, own) and mixed["loss/ptx"].value > 0


def test_the_mean_is_over_all_rows_however_they_are_cut(path):
    batch, rows = rollout(longest=3), documents()
    whole, first = gradient(path, batch, ptx=rows, config={"max_tokens_per_micro": None})
    cut, second = gradient(path, batch, ptx=rows, config={"max_tokens_per_micro": 15})
    assert float((whole - cut).norm() / whole.norm()) < 1e-6
    assert second["loss/ptx"].value == pytest.approx(first["loss/ptx"].value, rel=1e-6)


def test_rows_are_spread_over_the_updates(path):
    batch, rows = rollout((5, 9, 7, 6), 2), documents()
    together = module(path, updates_per_batch=2)
    together.train_step(batch, ptx=rows)
    apart = module(path)
    # Of several updates the anchor of the ratio is what the model was before the first one.
    batch = batch.with_(**module(path).forward_step(batch, into="old_logprobs"))
    for part, some in zip(batch.split(2, keep="group"), rows.split(2, keep="group"), strict=True):
        apart.train_step(part, ptx=some)
    assert same(weights(together), weights(apart))
    stats = together.train_step(rollout((5, 9), 2), ptx=documents((6,)))  # fewer rows than updates
    assert stats["loss/ptx"].count == 5 and stats["loss/ptx"].value > 0


def test_the_sampling_temperature_is_not_that_of_the_data(path):
    """A policy that samples at temperature 0.5 still learns the likelihood of other data as it is."""
    _, plain = gradient(path, documents(), loss="sft")
    _, cold = gradient(path, rollout(), ptx=documents(), config={"sampling": {"temperature": 0.5}})
    assert cold["loss/ptx"].value == pytest.approx(plain["loss/value"].value, rel=1e-6)


def test_a_model_without_a_language_model_head_is_refused(path):
    value = module(path, head="value", head_init="zero", loss={"fn": "value"})
    with pytest.raises(ValueError, match="'trainer' has no language-model head"):
        value.train_step(rollout().with_(values=torch.zeros(rollout().tokens_total)), ptx=documents())
