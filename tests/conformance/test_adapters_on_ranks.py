"""Adapters on sharded models: the same as in one process."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from coalign.data.batch import Batch
from tests.backends.batches import rollout
from tests.conformance.backends import Backend, build, exported, on_ranks
from tests.conformance.layouts import MODELS
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.slow
CONFIG = {"max_tokens_per_micro": 40, "activation_checkpointing": "full"}
# The model's shape, its adapters, and the number of weights that training changes.
KINDS = {
    "dora": ({}, {"rank": 4, "dora": True}, 14),
    "experts": (MODELS["moe"], {"rank": 2, "target": ["*.q_proj", "*.experts.*"]}, 18),
}


def train(rank: int, port: int, backend: Backend, path: str, folder: Path, batches: list[Batch]) -> dict:
    """Two steps, scored with and without the adapters in between; two more, straight and from a checkpoint."""
    part = lambda batch: batch.split(backend.ranks, keep="group")[rank]  # noqa: E731
    module = build(backend, path, rank=rank, port=port)
    before = module.forward_step(part(batches[0]), base=True)["ref_logprobs"]  # before any other forward
    for batch in batches[:2]:
        module.train_step(part(batch))
    module.save(folder / backend.name / "checkpoint")
    module.save_adapter(folder / backend.name / "adapter")
    middle = exported(module)
    result = {
        "base": before,
        "base_after": module.forward_step(part(batches[0]), base=True)["ref_logprobs"],
        "scored": module.forward_step(part(batches[0]))["ref_logprobs"],
        "middle": middle,
        "changing": sorted(exported(module, changing=True)),
        "after_scoring": exported(module),
    }
    for name in ("straight", "resumed"):
        for batch in batches[2:]:
            module.train_step(part(batch))
        result[name] = exported(module)
        module.load(folder / backend.name / "checkpoint")
    module.close()
    return result


@pytest.fixture(scope="module", params=KINDS)
def runs(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("ranks")
    shape, lora, changing = KINDS[request.param]
    path, config = str(tiny_model_dir(folder / "model", **shape)), CONFIG | {"lora": lora}
    batches = [rollout((5, 9, 7), 3, seed=i) for i in range(4)]
    backends = [Backend("one", "fsdp", config=config), Backend("two", "fsdp", ranks=2, config=config)]
    one, two = (on_ranks(b.ranks, train, folder, b, path, folder, batches) for b in backends)
    assert len(one[0]["changing"]) == changing
    return folder, one[0], two


def near(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        torch.testing.assert_close(tensor, b[name], rtol=1e-4, atol=1e-6)


def test_the_weights_of_one_process(runs):
    _, one, (first, _) = runs
    for moment in ("middle", "straight"):
        near(first[moment], one[moment])
    assert first["changing"] == one["changing"]


def test_scoring_leaves_the_weights_readable_and_alone(runs):
    _, _, (first, _) = runs
    near(first["after_scoring"], first["middle"])


def test_the_base_does_not_move(runs):
    _, one, two = runs
    assert all(torch.equal(each["base"], each["base_after"]) for each in (one, *two))
    torch.testing.assert_close(torch.cat([each["base"] for each in two]), one["base"])
    torch.testing.assert_close(torch.cat([each["scored"] for each in two]), one["scored"], rtol=1e-4, atol=1e-5)
    assert not torch.equal(one["scored"], one["base"])


def test_resume_is_bit_for_bit(runs):
    _, one, (first, _) = runs
    for each in (one, first):
        assert all(torch.equal(tensor, each["resumed"][name]) for name, tensor in each["straight"].items())


def test_the_adapter_of_two_ranks_is_that_of_one(runs):
    folder, _, _ = runs
    near(*(load_file(folder / name / "adapter" / "adapter_model.safetensors") for name in ("two", "one")))
