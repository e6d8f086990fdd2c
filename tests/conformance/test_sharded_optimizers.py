"""Optimizers and averages over several ranks against the same steps of one process."""

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import distribute_tensor
from transformers import AutoModelForCausalLM

from coalign.data.batch import Batch
from tests.backends.batches import rollout
from tests.conformance.backends import Backend, build, exported, on_ranks, same
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.slow


def backend(name: str, ranks: int) -> Backend:
    optimizer = {"name": name, "lr": 1e-3, "weight_decay": 0.1}
    return Backend(name, "fsdp", ranks=ranks, config={"optimizer": optimizer, "ema": {"decay": 0.5}})


def _train(rank: int, port: int, name: str, ranks: int, path: str, folder: Path, batches: list[Batch]) -> dict:
    """Three steps; then the last one once more, from a checkpoint before it."""
    trainer = build(backend(name, ranks), path, rank=rank, port=port)
    start = exported(trainer)
    for i, batch in enumerate(batches):
        if i == 2:
            trainer.save(folder / "checkpoint")
        trainer.train_step(batch.split(ranks, keep="group")[rank])
    ended, kinds = exported(trainer), {type(t).__name__ for t in trainer.average.tensors.values()}
    trainer.save_hf(folder / "average", average=True)
    unchanged = exported(trainer)
    trainer.load(folder / "checkpoint")
    trainer.train_step(batches[2].split(ranks, keep="group")[rank])
    resumed = exported(trainer)
    trainer.save_hf(folder / "again", average=True)
    trainer.close()
    return {"start": start, "ended": ended, "unchanged": unchanged, "resumed": resumed, "kinds": kinds}


def averages(folder: Path) -> dict[str, torch.Tensor]:
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {name: p.detach() for name, p in loaded.named_parameters()}


def relative(one: list[torch.Tensor], two: list[torch.Tensor]) -> float:
    one, two = (torch.cat([tensor.flatten() for tensor in tensors]) for tensors in (one, two))
    return float((one - two).norm() / one.norm())


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
def test_two_ranks_take_the_steps_of_one_process_and_resume_bit_for_bit(tmp_path, name):
    path = str(tiny_model_dir(tmp_path / "model"))
    batches = [rollout((5, 9, 7), 3, seed=i) for i in range(3)]
    results = {}
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        results[ranks] = on_ranks(ranks, _train, folder, name, ranks, path, folder, batches)[0]
        assert same(results[ranks]["ended"], results[ranks]["resumed"])
        assert same(results[ranks]["ended"], results[ranks]["unchanged"])
        assert same(averages(folder / "average"), averages(folder / "again"))
    assert results[2]["kinds"] == {"DTensor"}
    if name != "muon":  # it makes the noise in a gradient of low rank as large as the rest
        assert relative(*([r["ended"][n] - t for n, t in r["start"].items()] for r in results.values())) < 1e-4
        assert relative(*(list(averages(tmp_path / str(r) / "average").values()) for r in (1, 2))) < 1e-5


def _step(rank: int, port: int, ranks: int, path: str) -> dict[str, torch.Tensor]:
    """How far one step of Muon on gradients of full rank moves each parameter."""
    trainer = build(backend("muon", ranks), path, rank=rank, port=port)
    start = exported(trainer)
    generator = torch.Generator().manual_seed(0)
    for p in trainer.model.parameters():
        gradient = torch.randn(p.shape, generator=generator)
        p.grad = distribute_tensor(gradient, p.device_mesh, p.placements) if ranks > 1 else gradient
    trainer.optimizer.step()
    moved = {name: tensor - start[name] for name, tensor in exported(trainer).items()}
    trainer.close()
    return moved


def test_muon_orthogonalises_whole_matrices_not_shards(tmp_path):
    path = str(tiny_model_dir(tmp_path / "model"))
    one, two = (on_ranks(ranks, _step, tmp_path, ranks, path)[0] for ranks in (1, 2))
    for name, moved in one.items():
        # Muon computes in bfloat16, and over two ranks it adds up in another order.
        assert relative([moved], [two[name]]) < (0.05 if "proj" in name else 1e-6), name
