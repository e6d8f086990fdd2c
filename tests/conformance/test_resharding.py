"""A checkpoint of one layout is read by any other, bit for bit, and learning goes on as it would have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coalign.data.batch import Batch
from tests.backends.batches import rollout
from tests.conformance.backends import MEGATRON, Backend, build, exported, on_ranks, relative, same
from tests.conformance.layouts import models, share

pytestmark = [pytest.mark.backends, pytest.mark.timeout(900)]
TP, PP, CP, EP = "tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"
COPIES = "dp_replicate"
# (module, model, the layout that writes, those that read) on four ranks
RUNS = [
    ("fsdp", "tied", {TP: 2}, [{}, {CP: 2}, {COPIES: 2, TP: 2}]),
    ("fsdp", "moe", {EP: 2}, [{}, {TP: 2, EP: 4}]),
    ("megatron", "deep", {TP: 2, PP: 2}, [{}, {PP: 2, "megatron": {"virtual_pipeline": 2}}, {TP: 2, CP: 2}, {PP: 4}]),
    ("megatron", "moe", {EP: 2}, [{TP: 2, EP: 2}, {EP: 4, TP: 2, "megatron": {"expert_tensor_parallel": 1}}, {PP: 2}]),
]
CASES = [pytest.param(*run, id="-".join(run[:2]), marks=[MEGATRON] if run[0] == "megatron" else []) for run in RUNS]
CONFIG = {
    "fsdp": {"optimizer": {"lr": 1e-3, "weight_decay": 0.1}, "ema": {"decay": 0.5}},
    "megatron": {"optimizer": {"lr": 1e-3, "eps": 1e-3, "weight_decay": 0.1}},
}
TOLERANCE = {"fsdp": 1e-4, "megatron": 1e-5}  # of a further step, relative


def backend(name: str, ranks: int, config: dict[str, Any]) -> Backend:
    return Backend(name, name, ranks=ranks, config={"max_tokens_per_micro": 60, **CONFIG[name], **config})


def _run(
    rank: int, port: int, name: str, path: str, folder: Path, layouts: list[dict[str, Any]], batches: list[Batch]
) -> list:
    """(weights as saved or loaded, after one more step) of the layout that writes, then of those that read."""
    results = []
    for i, config in enumerate(layouts):
        module = build(backend(name, 4, config), path, rank=rank, port=port + i, **({"init": "random"} if i else {}))
        if i == 0:
            for batch in batches[:2]:
                module.train_step(share(batch, module))
            module.save(folder / "checkpoint")
        else:
            module.load(folder / "checkpoint")
        middle = exported(module)
        module.train_step(share(batches[2], module))
        results.append((middle, exported(module)))
        module.close()
    return results


@pytest.mark.parametrize(("name", "model", "writes", "read"), CASES)
def test_any_layout_reads_what_another_wrote(tmp_path, name, model, writes, read):
    path, batches = models(tmp_path)[model], [rollout((5, 9, 7, 6), 3, seed=i) for i in range(3)]
    (middle, ended), *others = on_ranks(4, _run, tmp_path, name, path, tmp_path, [writes, *read], batches)[0]
    alone = build(backend(name, 1, {}), path, init="random")
    alone.load(tmp_path / "checkpoint")
    before = exported(alone)
    alone.train_step(batches[2])
    for loaded, after in [*others, (before, exported(alone))]:
        assert same(loaded, middle)
        moves = ({key: each[key] - middle[key] for key in ended} for each in (after, ended))
        assert relative(*moves) < TOLERANCE[name]
