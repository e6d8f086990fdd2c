"""Parallel layouts of the Megatron backend against a plain Hugging Face training loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conformance.layouts import Layout, batch, expected, models, train
from tests.conformance.test_parallel import joined, relative

pytest.importorskip("megatron.core")


def cut(model: str, *, own: dict[str, Any] | None = None, **config: Any) -> Layout:
    """Gradients can be looked at where no rank has a part of them alone."""
    return Layout(model, {**config, "megatron": {"distributed_optimizer": False, **(own or {})}}, "megatron")


TP, PP, CP, EP = "tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"
TWO = [cut("tied", **{TP: 2}), cut("untied", **{PP: 2})]
TWO_SLOW = [
    cut("untied", **{CP: 2}),
    cut("tied", **{PP: 2}),
    cut("tied", own={"distributed_optimizer": True}),
    cut("untied"),
    cut("deep", **{TP: 2}),  # more ranks than groups of keys and values
    cut("deep", **{PP: 2}, own={"virtual_pipeline": 2}),
    cut("deep", **{PP: 2}, own={"first_stage_layers": 1}),
    cut("untied", **{TP: 2}, own={"sequence_parallel": False}),
    cut("untied", **{TP: 2}, activation_checkpointing="selective"),
    cut("deep", **{PP: 2}, activation_checkpointing="full"),
    cut("moe", **{EP: 2}),
    cut("moe", **{TP: 2}),
    cut("moe", **{TP: 2, EP: 2}, own={"expert_tensor_parallel": 1}),
    cut("moe", **{PP: 2}),
    cut("shared", **{EP: 2}),
]
FOUR_SLOW = [
    cut("deep", **{TP: 4}),
    cut("deep", **{PP: 4}),
    cut("tied", **{TP: 2, PP: 2}, activation_checkpointing="full"),
    cut("deep", **{TP: 2, PP: 2}, own={"virtual_pipeline": 2, "distributed_optimizer": True}),
    cut("untied", **{TP: 2, CP: 2}),
    cut("untied", **{CP: 2, PP: 2}),
    cut("deep", **{PP: 2}, own={"distributed_optimizer": True}),
    cut("moe", **{EP: 2, PP: 2}),
    cut("moe", **{TP: 2, EP: 2}, own={"expert_tensor_parallel": 1}),
    cut("moe", **{TP: 2, EP: 2}, own={"distributed_optimizer": True}),
    cut("shared", **{TP: 2, EP: 4}, own={"expert_tensor_parallel": 1}),
    cut("moe", **{CP: 2, EP: 2}),
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
        done |= {(ranks, str(each)): None for each in together}  # a start that fails is not tried again for each
        done |= {(ranks, name): result for name, result in train(ranks, together, paths, batches, folder).items()}
    assert done[ranks, str(layout)] is not None, "the ranks failed"
    return done[ranks, str(layout)], references[layout.model]


def test_a_layout_computes_and_learns_what_one_process_does(pair):
    got, want = pair
    assert got.before.keys() == want.before.keys()
    assert all(torch.equal(got.before[name], tensor) for name, tensor in want.before.items())
    assert float((got.logprobs - want.logprobs).abs().max()) < 1e-5
    if got.gradients:
        assert relative(joined(got.gradients, want.gradients), joined(want.gradients, want.gradients)) < 1e-5
    assert got.losses == pytest.approx(want.losses, rel=1e-4, abs=1e-5)
    assert got.norms == pytest.approx(want.norms, rel=2e-5)
    # AdamW's first steps are of the size of lr, whatever the gradient: where that is near 0, rounding decides the sign.
    moves = ({name: tensor - want.before[name] for name, tensor in each.after.items()} for each in (got, want))
    first, second = moves
    assert relative(joined(first, second), joined(second, second)) < 1e-4
    assert relative(joined(got.after, want.after), joined(want.after, want.after)) < 1e-4
