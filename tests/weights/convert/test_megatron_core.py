"""megatron-core loads what is written here, and what it writes is read here."""

import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file

from coalign.weights.convert import Request, convert
from tests.weights.convert import made

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed"),
]
LAYOUTS = [  # tensor, pipeline, data, expert, expert tensor
    (made.LLAMA, "1,1,1,1,1"),
    (made.LLAMA, "2,1,1,1,1"),
    (made.LLAMA, "1,2,1,1,1"),
    (made.QWEN2, "2,2,1,1,1"),
    (made.MIXTRAL, "1,1,2,2,1"),
    (made.MIXTRAL, "2,1,2,2,2"),
]
NAMES = [f"{hf['model_type']} {sizes}" for hf, sizes in LAYOUTS]


def megatron_core(action, folder, hf, sizes, store):
    command = [sys.executable, "-m", "tests.weights.convert.mcore", action, folder, hf, sizes, store]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize(("hf", "sizes"), LAYOUTS, ids=NAMES)
def test_megatron_core_loads_what_is_written(tmp_path, hf, sizes):
    source = made.model(tmp_path / "hf", hf)
    tensor = int(sizes.split(",")[0])
    convert(Request(source=source, output=tmp_path / "dist", to="megatron", tensor=tensor, flavour="local"))
    megatron_core("load", tmp_path / "dist" / "release", source, sizes, tmp_path / "store")


@pytest.mark.parametrize(("hf", "sizes"), LAYOUTS, ids=NAMES)
def test_what_megatron_core_writes_is_read(tmp_path, hf, sizes):
    source = made.model(tmp_path / "hf", hf)
    folder = tmp_path / "dist" / "iter_0000007"
    folder.mkdir(parents=True)
    (tmp_path / "dist" / "latest_checkpointed_iteration.txt").write_text("7")
    megatron_core("save", folder, source, sizes, tmp_path / "store")
    convert(Request(source=tmp_path / "dist", output=tmp_path / "back", to="hf", hf=source, verify=True))
    found, wanted = (load_file(path / "model.safetensors") for path in (tmp_path / "back", source))
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert torch.equal(found[name], wanted[name]), name
