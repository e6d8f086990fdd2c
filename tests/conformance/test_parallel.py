"""Parallel layouts of the FSDP backend against a plain Hugging Face training loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conformance.backends import joined, relative, same  # noqa: F401  (of layouts of other backends, too)
from tests.conformance.layouts import Layout, Result, batch, expected, models, train

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


def starts(two: list[Layout], more: list[Layout], four: list[Layout]) -> list[Any]:
    """(ranks, layouts) of each start of processes."""
    slow = (pytest.mark.backends, pytest.mark.timeout(1800))
    return [
        pytest.param(2, two, id="two", marks=slow),
        pytest.param(2, more, id="two-more", marks=slow),
        pytest.param(4, four, id="four", marks=slow),
    ]


@pytest.mark.parametrize(("ranks", "layouts"), starts(TWO, TWO_SLOW, FOUR_SLOW))
def test_layouts_compute_and_learn_what_one_process_does(ranks, layouts, tmp_path, subtests):
    check_each(ranks, layouts, tmp_path, subtests)


def check_each(ranks: int, layouts: list[Layout], folder: Path, subtests: pytest.Subtests) -> None:
    """The layouts of a list share one start of the processes, so they are one test; each reports by itself."""
    paths = models(folder)
    batches = {name: batch(path) for name, path in paths.items()}
    references = {name: expected(paths[name], batches[name]) for name in {layout.model for layout in layouts}}
    done = train(ranks, layouts, paths, batches, folder)
    for layout in layouts:
        with subtests.test(str(layout)):
            check(layout, done[str(layout)], references[layout.model])


def check(layout: Layout, got: Result, want: Result) -> None:
    assert same(got.before, want.before)
    assert relative(got.logprobs, want.logprobs) < 1e-6
    assert float((got.logprobs - want.logprobs).abs().max()) < 1e-5
    if layout.shows_gradients:
        assert relative(got.gradients, want.gradients) < 1e-5
    assert got.losses == pytest.approx(want.losses, rel=1e-4, abs=1e-5)
    assert got.norms == pytest.approx(want.norms, rel=2e-5)
    # AdamW's first steps are of the size of lr, whatever the gradient: where that is near 0, rounding decides the sign.
    moves = ({name: tensor - want.before[name] for name, tensor in each.after.items()} for each in (got, want))
    assert relative(*moves) < 1e-4
    assert relative(got.after, want.after) < 1e-4
