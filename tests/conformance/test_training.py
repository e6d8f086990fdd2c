"""Any trainable backend against a plain Hugging Face training loop."""

from functools import cache
from pathlib import Path

import pytest
import torch

from tests.conformance import reference
from tests.conformance.backends import BACKENDS, DEEPSPEED, MEGATRON, train
from tests.modules.batches import rollout
from tests.tiny import tiny_model_dir


def runs():
    """Each backend with tied and untied embeddings. Processes take seconds to start: one such run is enough daily."""
    for backend in BACKENDS:
        for tied in (True, False):
            few = backend.ranks == 1 or (tied and backend.config.get("compute_dtype") is None)
            marks = [] if few and not backend.slow else [pytest.mark.slow]
            marks += {"deepspeed": [DEEPSPEED], "megatron": [MEGATRON]}.get(backend.module, [])
            name = f"{backend.name}-{'tied' if tied else 'untied'}"
            yield pytest.param((backend, tied), id=name, marks=marks)


@cache
def case(tied: bool, folder: Path):
    """(model directory, batch, what the reference made of them)."""
    path = str(tiny_model_dir(folder / f"tied-{tied}", tied=tied))
    batch = rollout((5, 9, 12), 3)
    noise = 0.1 * torch.randn(batch.tokens_total, generator=torch.Generator().manual_seed(1))
    model = reference.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    old = torch.zeros(batch.tokens_total)
    old[batch["loss_mask"]] = reference.logprobs(model, batch).detach()
    batch = batch.with_(old_logprobs=old + noise)
    return path, batch, reference.train(path, batch)


@pytest.fixture(scope="session", params=runs())
def reports(request, tmp_path_factory):
    """(tolerance, what the backend did, what the reference did)."""
    backend, tied = request.param
    path, batch, expected = case(tied, tmp_path_factory.getbasetemp())
    return backend.tolerance, train(backend, path, batch, tmp_path_factory.mktemp(backend.name)), expected


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_exported_names_and_values_are_hugging_faces(reports):
    _, got, expected = reports
    assert set(got.before) == set(expected.before)
    given = got.before
    assert all(torch.equal(given[name], tensor.to(given[name].dtype)) for name, tensor in expected.before.items())


def test_logprobs(reports):
    tolerance, got, expected = reports
    assert relative(got.logprobs, expected.logprobs) < tolerance


def test_losses(reports):
    tolerance, got, expected = reports
    assert got.losses == pytest.approx(expected.losses, rel=100 * tolerance, abs=10 * tolerance)


def test_gradient_norms(reports):
    tolerance, got, expected = reports
    assert got.norms[0] == pytest.approx(expected.norms[0], rel=2 * tolerance)
    if tolerance < 1e-3:  # a coarser backend is at other weights by now
        assert got.norms == pytest.approx(expected.norms, rel=20 * tolerance)


def test_weights_after_three_steps(reports):
    # AdamW's first steps are of the size of lr, whatever the gradient: where that is near 0, rounding decides the sign.
    tolerance, got, expected = reports
    moves = [
        (got.after[name] - got.before[name], tensor - expected.before[name]) for name, tensor in expected.after.items()
    ]
    whole = [torch.cat([move[i].flatten() for move in moves]) for i in (0, 1)]
    assert relative(*whole) < max(1e-4, 10 * tolerance)
