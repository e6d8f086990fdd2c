"""Parallel layouts of the Megatron backend against a plain Hugging Face training loop."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance.layouts import Layout
from tests.conformance.test_parallel import check_each, starts

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


@pytest.mark.parametrize(("ranks", "layouts"), starts(TWO, TWO_SLOW, FOUR_SLOW))
def test_layouts_compute_and_learn_what_one_process_does(ranks, layouts, tmp_path, subtests):
    check_each(ranks, layouts, tmp_path, subtests)
