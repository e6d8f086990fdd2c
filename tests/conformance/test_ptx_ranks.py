"""Language modelling on other rows, over two ranks of which one may have no such rows."""

from pathlib import Path

import pytest
import torch

from tests.backends.batches import rollout
from tests.backends.test_ptx import documents
from tests.conformance.backends import Backend, build, exported, on_ranks
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.slow


def _train(rank: int, port: int, ranks: int, path: str) -> tuple[list[dict], dict[str, torch.Tensor]]:
    trainer = build(Backend("fsdp", "fsdp", ranks=ranks), path, rank=rank, port=port, max_tokens_per_micro=24)
    stats = []
    for lengths in ((11, 6, 14, 9), (9,)):
        part, rows = (batch.split(ranks, keep="group")[rank] for batch in (rollout((5, 9, 7), 2), documents(lengths)))
        stats.append(trainer.train_step(part, ptx=rows, ptx_coef=0.5))
    weights = exported(trainer)
    trainer.close()
    return stats, weights


def test_two_ranks_take_the_steps_of_one_process(tmp_path: Path):
    path = str(tiny_model_dir(tmp_path / "model"))
    [(alone, expected)] = on_ranks(1, _train, tmp_path, 1, path)
    (first, weights), (second, _) = on_ranks(2, _train, tmp_path, 2, path)
    for one, a, b in zip(alone, first, second, strict=True):
        assert (a["loss/ptx"] + b["loss/ptx"]).value == pytest.approx(one["loss/ptx"].value, rel=1e-4)
        assert a["loss/grad_norm"].value == pytest.approx(one["loss/grad_norm"].value, rel=1e-4)
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=1e-4)
