"""Parallel layouts of the FSDP backend against a plain Hugging Face training loop."""

from __future__ import annotations

import pytest
import torch

from tests.conformance.layouts import Layout, batch, expected, models, train

TWO = [
    Layout("tied", {"tensor_parallel": 2}),
    Layout("untied", {"context_parallel": 2}),
    Layout("moe", {"expert_parallel": 2}),
]
TWO_SLOW = [
    Layout("untied", {"tensor_parallel": 2}),
    Layout("tied", {"context_parallel": 2}),
    Layout("tied", {"dp_replicate": 2}),
    Layout("untied", {"context_parallel": 2, "compile": True}),
    Layout("moe", {}),
    Layout("moe", {"tensor_parallel": 2, "expert_parallel": 2}),
    Layout("moe", {"tensor_parallel": 2}),
    Layout("moe", {"context_parallel": 2, "expert_parallel": 2}),
    Layout("shared", {"tensor_parallel": 2}),
    Layout("shared", {"expert_parallel": 2}),
]
FOUR_SLOW = [
    Layout("tied", {"dp_replicate": 2}),
    Layout("tied", {"tensor_parallel": 2}),
    Layout("untied", {"tensor_parallel": 2}),
    Layout("untied", {"dp_replicate": 2, "tensor_parallel": 2}),
    Layout("tied", {"context_parallel": 2}),
    Layout("tied", {"context_parallel": 4}),
    Layout("untied", {"dp_replicate": 2, "context_parallel": 2}),
    Layout("tied", {"tensor_parallel": 2, "context_parallel": 2}),
    Layout("moe", {"expert_parallel": 2}),
    Layout("moe", {"expert_parallel": 4}),
    Layout("moe", {"dp_replicate": 2, "expert_parallel": 2}),
    Layout("moe", {"tensor_parallel": 2, "expert_parallel": 2}),
    Layout("moe", {"tensor_parallel": 2, "expert_parallel": 4}),
    Layout("moe", {"tensor_parallel": 2, "context_parallel": 2, "expert_parallel": 2}),
    Layout("shared", {"tensor_parallel": 2, "expert_parallel": 2}),
]
slow = (pytest.mark.backends, pytest.mark.timeout(1800))
RUNS = [(2, TWO, ()), (2, TWO_SLOW, slow), (4, FOUR_SLOW, slow)]
CASES = [pytest.param((n, layout), id=f"{n}x-{layout}", marks=marks) for n, all_, marks in RUNS for layout in all_]


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """The models, a batch for each, what the reference makes of it, and what layouts did (filled when first asked)."""
    folder = tmp_path_factory.mktemp("layouts")
    paths = models(folder)
    batches = {name: batch(path) for name, path in paths.items()}
    return folder, paths, batches, {name: expected(path, batches[name]) for name, path in paths.items()}, {}


@pytest.fixture(params=CASES)
def pair(request, given):
    """(what a layout did, what the reference did). The layouts of a list share one start of the processes."""
    folder, paths, batches, references, done = given
    ranks, layout = request.param
    if (ranks, str(layout)) not in done:
        together = next(all_ for n, all_, _ in RUNS if n == ranks and layout in all_)
        done |= {(ranks, name): result for name, result in train(ranks, together, paths, batches, folder).items()}
    return done[ranks, str(layout)], references[layout.model]


def joined(tensors: dict[str, torch.Tensor], like: dict[str, torch.Tensor]) -> torch.Tensor:
    assert tensors.keys() == like.keys()
    return torch.cat([tensors[name].flatten() for name in like])


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_a_layout_computes_and_learns_what_one_process_does(pair):
    got, want = pair
    assert all(torch.equal(got.before[name], tensor) for name, tensor in want.before.items())
    assert relative(got.logprobs, want.logprobs) < 1e-6
    assert float((got.logprobs - want.logprobs).abs().max()) < 1e-5
    assert relative(joined(got.gradients, want.gradients), joined(want.gradients, want.gradients)) < 1e-5
    assert got.losses == pytest.approx(want.losses, rel=1e-4, abs=1e-5)
    assert got.norms == pytest.approx(want.norms, rel=2e-5)
    # AdamW's first steps are of the size of lr, whatever the gradient: where that is near 0, rounding decides the sign.
    moves = ({name: tensor - want.before[name] for name, tensor in each.after.items()} for each in (got, want))
    first, second = moves
    assert relative(joined(first, second), joined(second, second)) < 1e-4
    assert relative(joined(got.after, want.after), joined(want.after, want.after)) < 1e-4
