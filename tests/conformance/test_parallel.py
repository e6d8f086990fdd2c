"""Parallel layouts of the FSDP backend against a plain Hugging Face training loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conformance.backends import joined, relative, same  # noqa: F401  (of layouts of other backends, too)
from tests.conformance.layouts import CP, EP, TP, Layout, Result, batch, expected, list_layouts, models, train

COPIES = {"dp_replicate": 2}
TWO = list_layouts(tied=[TP], untied=[CP], moe=[EP])
TWO_SLOW = list_layouts(
    tied=[CP, COPIES],
    untied=[TP, CP | {"compile": True}],
    moe=[{}, TP | EP, TP, CP | EP],
    shared=[TP, EP],
)
FOUR_SLOW = list_layouts(
    tied=[COPIES, TP, CP, {"context_parallel": 4}, TP | CP],
    untied=[TP, COPIES | TP, COPIES | CP],
    moe=[EP, {"expert_parallel": 4}, COPIES | EP, TP | EP, TP | {"expert_parallel": 4}, TP | CP | EP],
    shared=[TP | EP],
)


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
