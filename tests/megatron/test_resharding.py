"""A checkpoint of one layout is read by any other, bit for bit, and learning goes on as it would have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from coalign.data.batch import Batch
from tests.conformance.backends import Backend, build, exported, on_ranks
from tests.conformance.layouts import models, share
from tests.modules.batches import rollout

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.backends, pytest.mark.timeout(900)]
TP, PP, CP, EP = "tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"
# (model, the layout that writes, those that read) on four ranks
RUNS = [
    ("deep", {TP: 2, PP: 2}, [{}, {PP: 2, "megatron": {"virtual_pipeline": 2}}, {TP: 2, CP: 2}, {PP: 4}]),
    ("moe", {EP: 2}, [{TP: 2, EP: 2}, {EP: 4, TP: 2, "megatron": {"expert_tensor_parallel": 1}}, {PP: 2}]),
]
CONFIG = {"optimizer": {"lr": 1e-3, "eps": 1e-3, "weight_decay": 0.1}, "max_tokens_per_micro": 60}


def megatron(ranks: int, config: dict[str, Any]) -> Backend:
    return Backend("megatron", "megatron", ranks=ranks, config=CONFIG | config)


def _run(rank: int, port: int, path: str, folder: Path, layouts: list[dict[str, Any]], batches: list[Batch]) -> list:
    """(weights as saved or loaded, after one more step) of the layout that writes, then of those that read."""
    results = []
    for i, config in enumerate(layouts):
        module = build(megatron(4, config), path, rank=rank, port=port + i, **({"init": "random"} if i else {}))
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


@pytest.mark.parametrize(("model", "writes", "read"), RUNS, ids=[model for model, _, _ in RUNS])
def test_any_layout_reads_what_another_wrote(tmp_path, model, writes, read):
    path, batches = models(tmp_path)[model], [rollout((5, 9, 7, 6), 3, seed=i) for i in range(3)]
    (middle, ended), *others = on_ranks(4, _run, tmp_path, path, tmp_path, [writes, *read], batches)[0]
    alone = build(megatron(1, {}), path, init="random")
    alone.load(tmp_path / "checkpoint")
    before = exported(alone)
    alone.train_step(batches[2])
    for loaded, after in [*others, (before, exported(alone))]:
        assert loaded.keys() == middle.keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in middle.items())
        moved = torch.cat([(tensor - middle[name]).flatten() for name, tensor in ended.items()])
        again = torch.cat([(after[name] - middle[name]).flatten() for name in ended])
        assert float((again - moved).norm() / moved.norm()) < 1e-5
