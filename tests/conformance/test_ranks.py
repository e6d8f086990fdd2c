"""What only several processes can get wrong."""

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import distribute_tensor

from coalign.data.batch import Batch
from tests.backends.batches import rollout
from tests.conformance.backends import Backend, build, exported, on_ranks, same
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.slow
MUON = {"name": "muon", "lr": 1e-3, "weight_decay": 0.1}
ONE, TWO = Backend("one", "fsdp"), Backend("two", "fsdp", ranks=2, config={"max_tokens_per_micro": 40})


def _halfway(rank: int, port: int, path: str, folder: Path, batches: list[Batch]) -> dict:
    """Four steps straight, with a checkpoint of the second; then one with an idle rank."""
    straight = build(TWO, path, rank=rank, port=port)
    for i, batch in enumerate(batches):
        straight.train_step(batch.split(2, keep="group")[rank])
        if i == 1:
            straight.save(folder / "checkpoint")
            middle = exported(straight)
    ended = exported(straight)
    shares = {name: tensor.nbytes for name, tensor in straight.export_weights()}
    alone = batches[0] if rank == 0 else batches[0].select([])
    stats = straight.train_step(alone)
    scored = straight.forward_step(alone)["ref_logprobs"]
    straight.close()
    return {"middle": middle, "ended": ended, "shares": shares, "alone": stats, "scored": scored}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    path = str(tiny_model_dir(folder / "model"))
    batches = [rollout((5, 9, 7), 3, seed=i) for i in range(4)]
    return path, folder, batches, on_ranks(2, _halfway, folder, path, folder, batches)


def test_each_rank_exports_a_share_of_half_the_bytes(run):
    first, second = (rank["shares"] for rank in run[-1])
    assert not first.keys() & second.keys() and first.keys() | second.keys() == run[-1][0]["ended"].keys()
    assert abs(sum(first.values()) - sum(second.values())) <= max((first | second).values())


def test_one_process_reads_what_two_wrote(run):
    path, folder, batches, (first, _) = run
    trainer = build(ONE, path, init="random")
    trainer.load(folder / "checkpoint")
    assert same(first["middle"], dict(trainer.export_weights()))
    for batch in batches[2:]:
        trainer.train_step(batch)
    for name, tensor in trainer.export_weights():
        torch.testing.assert_close(tensor.detach(), first["ended"][name], rtol=1e-3, atol=1e-4)


def test_a_rank_without_sequences_takes_part(run):
    _, _, batches, (first, second) = run
    assert first["alone"]["tokens/trained"].value == int(batches[0]["loss_mask"].sum())
    assert second["alone"]["tokens/trained"].value == 0
    assert first["alone"]["loss/grad_norm"].value == second["alone"]["loss/grad_norm"].value > 0
    assert len(first["scored"]) == batches[0].tokens_total and len(second["scored"]) == 0


def _step(rank: int, port: int, ranks: int, path: str) -> dict[str, torch.Tensor]:
    """How far one step of Muon on gradients of full rank moves each parameter."""
    trainer = build(Backend("muon", "fsdp", ranks, {"optimizer": MUON}), path, rank=rank, port=port)
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
        assert float((moved - two[name]).norm() / moved.norm()) < (0.05 if "proj" in name else 1e-6), name
