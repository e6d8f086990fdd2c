"""Ranks that train on images do what one process of fsdp does: its own layouts, DeepSpeed's and Megatron's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from coalign.data.batch import Batch
from tests.backends.test_images import answer, load_prompts
from tests.conformance.backends import DEEPSPEED, MEGATRON, relative
from tests.conformance.layouts import CP, EP, TP, Layout, Result, list_layouts, train
from tests.vision import vision_model_dir

OTHER_SCALES = {"tower_lr_scale": 0.1, "projector_lr_scale": 2.0}
TWO = list_layouts(
    qwen2_5_vl=[{}, TP, CP],
    qwen3_vl=[TP, CP | {"compile": True}],
    qwen3_vl_moe=[EP, TP | EP],
    gemma3=[TP, CP],
    **{"idefics3": [{}], "internvl": [TP], "llava": [CP]},
)
FOUR = list_layouts(qwen3_vl=[TP | CP], qwen2_5_vl=[TP], qwen3_vl_moe=[TP | CP | EP])
ZERO = list_layouts(
    "deepspeed",
    qwen2_5_vl=[{"deepspeed": {"stage": stage}} for stage in (1, 2, 3)],
    qwen3_vl=[{"deepspeed": {"stage": 3}}],
)
PP = {"pipeline_parallel": 2}
SUMS: dict[str, Any] = {"megatron": {"distributed_optimizer": False}}  # every rank has whole gradients
MEGATRON_ONE = list_layouts("megatron", qwen2_5_vl=[SUMS], qwen2_vl=[SUMS], qwen3_vl=[SUMS])
MEGATRON_TWO = list_layouts(
    "megatron",
    qwen2_5_vl=[TP | SUMS, PP | SUMS, CP | SUMS, TP, {"megatron": {"distributed_optimizer": True}}],
    qwen2_vl=[PP],
    qwen3_vl=[TP | SUMS, PP | SUMS, CP],
)
MEGATRON_FOUR = list_layouts("megatron", qwen2_5_vl=[TP | PP | SUMS, PP | CP])
SLOW = (pytest.mark.backends, pytest.mark.timeout(1800))


def configure(layout: Layout, **more: Any) -> Layout:
    """The layout with a model that sees, and an optimizer whose steps rounding does not turn around."""
    optimizer = {"lr": 1e-2, "eps": 1e-3}
    return replace(
        layout, config={"vision": {}, "max_tokens_per_micro": 260, "optimizer": optimizer, **layout.config, **more}
    )


def make_batch(folder: Path, model: Path) -> Batch:
    """Answers of which the first ranks have all images: the last prompt is text alone."""
    folder.mkdir()
    batch = answer(load_prompts(folder, model)).select([*range(3), *range(6, 9), *range(3, 6)])
    return batch.with_(advantages=torch.randn(batch.tokens_total, generator=torch.Generator().manual_seed(5)))


def check_each(ranks: int, layouts: list[Layout], folder: Path, subtests: pytest.Subtests, **more: Any) -> None:
    names = sorted({layout.model for layout in layouts})
    paths = {name: vision_model_dir(folder / name, name) for name in names}
    batches = {name: make_batch(folder / f"images-{name}", paths[name]) for name in names}
    told = {name: str(path) for name, path in paths.items()}
    alone = train(1, [configure(Layout(name), **more) for name in names], told, batches, folder)
    found = train(ranks, [configure(layout, **more) for layout in layouts], told, batches, folder)
    for layout in layouts:
        with subtests.test(str(layout)):
            check(found[str(configure(layout, **more))], alone[str(configure(Layout(layout.model), **more))])


def check(got: Result, want: Result) -> None:
    torch.testing.assert_close(got.before, want.before, rtol=0, atol=0)
    torch.testing.assert_close(got.logprobs, want.logprobs, rtol=0, atol=1e-5)
    if got.gradients:
        assert got.gradients.keys() == want.gradients.keys()
        for part in ("visual", "vision", "projector", "connector", ""):
            names = {name for name in want.gradients if part in name}
            if names:
                own, expected = ({name: each.gradients[name] for name in names} for each in (got, want))
                assert relative(own, expected) < 1e-5, part
    assert got.losses == pytest.approx(want.losses, rel=1e-5, abs=1e-5)
    assert got.norms == pytest.approx(want.norms, rel=1e-5)
    torch.testing.assert_close(got.after, want.after, rtol=1e-5, atol=1e-5)
    assert list_moved(got) == list_moved(want)


def list_moved(result: Result) -> list[str]:
    return [name for name, tensor in result.after.items() if not torch.equal(tensor, result.before[name])]


@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [
        pytest.param(2, list_layouts(qwen2_5_vl=[TP]), id="tensor", marks=pytest.mark.slow),
        pytest.param(2, TWO, id="two", marks=SLOW),
        pytest.param(4, FOUR, id="four", marks=SLOW),
    ],
)
def test_layouts_learn_from_images_what_one_process_does(ranks, layouts, tmp_path, subtests):
    check_each(ranks, layouts, tmp_path, subtests)


@MEGATRON
@pytest.mark.backends
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("ranks", "layouts"), [(1, MEGATRON_ONE), (2, MEGATRON_TWO), (4, MEGATRON_FOUR)], ids=["one", "two", "four"]
)
def test_megatron_learns_from_images_what_fsdp_does(ranks, layouts, tmp_path, subtests):
    check_each(ranks, layouts, tmp_path, subtests)


@DEEPSPEED
@pytest.mark.backends
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("vision", [{}, OTHER_SCALES, {"tower": "freeze"}], ids=["whole", "scales", "frozen"])
def test_zero_learns_from_images_what_one_process_does(vision, tmp_path, subtests):
    check_each(2, ZERO if not vision else ZERO[1:3], tmp_path, subtests, vision=vision)
