"""Checkpoints and exports that every backend writes while it trains on hold what was there when they began."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from coalign.data.batch import Batch
from coalign.files import read_report
from tests.backends.batches import rollout
from tests.conformance.backends import DEEPSPEED, MEGATRON, Backend, build, exported, on_ranks, same, zero
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.backends
LORA = {"lora": {"rank": 2}}
BACKENDS = [
    Backend("fsdp", "fsdp", 2),
    *(pytest.param(Backend(f"deepspeed-{stage}", "deepspeed", 2, zero(stage)), marks=DEEPSPEED) for stage in (2, 3)),
    pytest.param(Backend("deepspeed-lora", "deepspeed", 2, zero(2) | LORA), marks=DEEPSPEED),
    pytest.param(Backend("megatron", "megatron", 2), marks=MEGATRON),
    pytest.param(Backend("megatron-alone", "megatron", 1), marks=MEGATRON),
    pytest.param(Backend("megatron-lora", "megatron", 2, {"tensor_parallel": 2} | LORA), marks=MEGATRON),
]


def _train(rank: int, port: int, backend: Backend, path: str, folder: Path, batches: list[Batch]) -> dict:
    """Three steps, saved after the first one; then the same two again from the checkpoint."""
    module = build(backend, path, rank=rank, port=port)
    rows = 1 if "tensor_parallel" in backend.config else backend.ranks  # ranks that cut a row all get it

    def cut(batch: Batch) -> Batch:
        return batch.split(rows, keep="group")[rank % rows]

    module.train_step(cut(batches[0]))
    assert module.begin_saves()
    module.save(folder / "model")
    module.save_hf(folder / "hf")
    if backend.config.get("lora"):
        module.save_adapter(folder / "adapter")

    def train_on() -> tuple[dict, dict]:
        """The weights before and after the last two steps."""
        before = exported(module)
        for batch in batches[1:]:
            module.train_step(cut(batch))
        return before, exported(module)

    saved, ended = train_on()
    module.finish_saves()
    module.load(folder / "model")
    loaded, again = train_on()
    module.close()
    return {"saved": saved, "ended": ended, "loaded": loaded, "again": again}


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_files_are_of_the_moment_at_which_they_began(tmp_path, backend):
    path = str(tiny_model_dir(tmp_path / "model_dir"))
    batches = [rollout((5, 9, 7), 3, seed=i) for i in range(3)]
    found = on_ranks(backend.ranks, _train, tmp_path, backend, path, tmp_path, batches)[0]
    assert not same(found["saved"], found["ended"])
    assert same(found["loaded"], found["saved"]) and same(found["again"], found["ended"])
    for name in ("model", "hf", *(["adapter"] if backend.config.get("lora") else [])):
        assert read_report(tmp_path / name) == "" and any((tmp_path / name).iterdir())
    files = {}
    for file in (tmp_path / "hf").glob("*.safetensors"):
        files |= load_file(file)
    assert all(torch.equal(files[name], tensor) for name, tensor in found["saved"].items() if name in files)
    assert files.keys() & found["saved"].keys()
