"""What every backend writes while it trains on is of the moment at which it began, and training goes on from there bit
for bit; over two ranks of fsdp as in one process, with any optimizer, with averages and with adapters."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from coalign.data.batch import Batch
from coalign.files import read_report
from tests.backends.batches import rollout
from tests.conformance.backends import DEEPSPEED, MEGATRON, Backend, build, exported, on_ranks, relative, same, zero
from tests.conformance.layouts import MODELS
from tests.tiny import tiny_model_dir

LORA = {"lora": {"rank": 2}}
CHECKPOINTED = {"max_tokens_per_micro": 40, "activation_checkpointing": "full"}
EXPERTS = {"lora": {"rank": 2, "target": ["*.q_proj", "*.experts.*"]}}
STEP = {"lr": 1e-3, "weight_decay": 0.1}
AVERAGED, ADAPTED = ("adamw", "adafactor", "muon"), ("dora", "experts")
BACKENDS = [
    *(Backend(name, "fsdp", 2, {"optimizer": {"name": name} | STEP, "ema": {"decay": 0.5}}) for name in AVERAGED),
    Backend("dora", "fsdp", 2, CHECKPOINTED | {"lora": {"rank": 4, "dora": True}}),
    Backend("experts", "fsdp", 2, CHECKPOINTED | EXPERTS),
    *(Backend(f"deepspeed-{stage}", "deepspeed", 2, zero(stage)) for stage in (2, 3)),
    Backend("deepspeed-lora", "deepspeed", 2, zero(2) | LORA),
    Backend("megatron", "megatron", 2),
    Backend("megatron-alone", "megatron", 1),
    Backend("megatron-lora", "megatron", 2, {"tensor_parallel": 2} | LORA),
]
NEEDS = {"fsdp": [pytest.mark.slow]}
NEEDS |= {"deepspeed": [DEEPSPEED, pytest.mark.backends], "megatron": [MEGATRON, pytest.mark.backends]}


def _train(rank: int, port: int, backend: Backend, path: str, folder: Path, batches: list[Batch]) -> dict[str, Any]:
    """Four steps, with all that is written after the second; then the last two again, from the checkpoint."""
    module, config = build(backend, path, rank=rank, port=port), backend.config
    rows = 1 if "tensor_parallel" in config else backend.ranks  # ranks that cut a row all get it
    parts = [batch.split(rows, keep="group")[rank % rows] for batch in batches]
    scores = module.config.lora and backend.module == "fsdp"
    found = {"start": exported(module)}
    if scores:
        found["base"] = module.forward_step(parts[0], base=True)["ref_logprobs"]  # before any other forward
    for part in parts[:2]:
        module.train_step(part)
    assert module.begin_saves()
    module.save(folder / "model")
    module.save_hf(folder / "hf")
    if module.config.lora:
        module.save_adapter(folder / "adapter")
    found["middle"] = exported(module)
    if scores:
        found["base_after"] = module.forward_step(parts[0], base=True)["ref_logprobs"]
        found["scored"] = module.forward_step(parts[0])["ref_logprobs"]
        found["changing"] = exported(module, changing=True)

    def train_on(average: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The weights before and after the last two steps."""
        before = exported(module)
        for part in parts[2:]:
            module.train_step(part)
        ended = exported(module)
        module.finish_saves()
        if module.config.ema:
            module.save_hf(folder / average, average=True)
            found["types"] = {type(tensor).__name__ for tensor in module.average.tensors.values()}
            assert same(exported(module), ended)
        return before, ended

    found["scored_weights"], found["ended"] = train_on("average")
    module.load(folder / "model")
    found["loaded"], found["again"] = train_on("average_again")
    module.close()
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """``run(name, ranks)``: the folder, and what each rank found; once."""
    batches = [rollout((5, 9, 7), 3, seed=i) for i in range(4)]

    @cache
    def run(name: str, ranks: int) -> tuple[Path, list[dict[str, Any]]]:
        [backend] = [replace(each, ranks=ranks) for each in BACKENDS if each.name == name]
        folder = tmp_path_factory.mktemp(name)
        path = str(tiny_model_dir(folder / "model_dir", **(MODELS["moe"] if name == "experts" else {})))
        return folder, on_ranks(ranks, _train, folder, backend, path, folder, batches)

    return run


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("backend", [pytest.param(each, id=each.name, marks=NEEDS[each.module]) for each in BACKENDS])
def test_files_are_of_the_moment_at_which_they_began(run, backend):
    folder, [found, *_] = run(backend.name, backend.ranks)
    assert not same(found["middle"], found["ended"]) and same(found["middle"], found["scored_weights"])
    assert same(found["loaded"], found["middle"]) and same(found["again"], found["ended"])
    for part in ("model", "hf", *(["adapter"] if "lora" in backend.config else [])):
        assert read_report(folder / part) == "" and any((folder / part).iterdir())
    files = read_tensors(folder / "hf")
    assert all(torch.equal(files[name], tensor) for name, tensor in found["middle"].items() if name in files)
    assert files.keys() & found["middle"].keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", [*AVERAGED, *ADAPTED])
def test_two_ranks_take_the_steps_of_one_process(run, name):
    (_, [alone]), (_, [first, _]) = run(name, 1), run(name, 2)
    assert same(alone["again"], alone["ended"])
    if name != "muon":  # it makes the noise in a gradient of low rank as large as the rest
        moved, alone_moved = ({n: t - each["start"][n] for n, t in each["ended"].items()} for each in (first, alone))
        assert relative(moved, alone_moved) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", AVERAGED)
def test_averages_are_sharded_and_come_back(run, name):
    (alone, _), (folder, [first, _]) = run(name, 1), run(name, 2)
    assert first["types"] == {"DTensor"}
    for each in (alone, folder):
        assert same(read_tensors(each / "average"), read_tensors(each / "average_again"))
    if name != "muon":
        assert relative(read_tensors(folder / "average"), read_tensors(alone / "average")) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("name", "changing"), [("dora", 14), ("experts", 18)])
def test_adapters_over_ranks_are_those_of_one_process(run, name, changing):
    (one_folder, [one]), (two_folder, two) = run(name, 1), run(name, 2)
    assert one["changing"].keys() == two[0]["changing"].keys() and len(one["changing"]) == changing
    assert all(torch.equal(each["base"], each["base_after"]) for each in (one, *two))
    torch.testing.assert_close(torch.cat([each["base"] for each in two]), one["base"])
    torch.testing.assert_close(torch.cat([each["scored"] for each in two]), one["scored"], rtol=1e-4, atol=1e-5)
    assert not torch.equal(one["scored"], one["base"])
    adapters = (read_tensors(folder / "adapter") for folder in (two_folder, one_folder))
    torch.testing.assert_close(*adapters, rtol=1e-4, atol=1e-6)
