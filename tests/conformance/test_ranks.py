"""What only several processes can get wrong."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from coalign.data.batch import Batch
from tests.backends.batches import rollout
from tests.conformance.backends import Backend, build, exported, on_ranks, same
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.slow
ONE, TWO = Backend("one", "fsdp"), Backend("two", "fsdp", ranks=2, config={"max_tokens_per_micro": 40})


def _halfway(rank: int, port: int, path: str, folder: Path, batches: list[Batch]) -> dict:
    """Four steps straight, while a checkpoint of the second is written; then from there; also with an idle rank."""
    straight = build(TWO, path, rank=rank, port=port)
    for i, batch in enumerate(batches):
        straight.train_step(batch.split(2, keep="group")[rank])
        if i == 1:
            assert straight.begin_saves()
            straight.save(folder / "checkpoint")
            straight.save_hf(folder / "hf")
            middle = exported(straight)
    ended = exported(straight)
    straight.finish_saves()
    straight.load(folder / "checkpoint")
    for batch in batches[2:]:
        straight.train_step(batch.split(2, keep="group")[rank])
    resumed = exported(straight)
    shares = {name: tensor.nbytes for name, tensor in straight.export_weights()}
    alone = batches[0] if rank == 0 else batches[0].select([])
    stats = straight.train_step(alone)
    scored = straight.forward_step(alone)["ref_logprobs"]
    straight.close()
    result = {"middle": middle, "ended": ended, "resumed": resumed}
    return result | {"shares": shares, "alone": stats, "scored": scored}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    path = str(tiny_model_dir(folder / "model"))
    batches = [rollout((5, 9, 7), 3, seed=i) for i in range(4)]
    return path, folder, batches, on_ranks(2, _halfway, folder, path, folder, batches)


def test_resume_is_bit_for_bit(run):
    first = run[-1][0]
    assert same(first["ended"], first["resumed"])


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


def test_two_processes_write_a_hugging_face_directory(run):
    _, folder, _, (first, _) = run
    loaded = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    assert same(first["middle"], dict(loaded.named_parameters()))


def test_a_rank_without_sequences_takes_part(run):
    _, _, batches, (first, second) = run
    assert first["alone"]["tokens/trained"].value == int(batches[0]["loss_mask"].sum())
    assert second["alone"]["tokens/trained"].value == 0
    assert first["alone"]["loss/grad_norm"].value == second["alone"]["loss/grad_norm"].value > 0
    assert len(first["scored"]) == batches[0].tokens_total and len(second["scored"]) == 0
