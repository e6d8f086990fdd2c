"""megatron-core loads what is written here, and what it writes is read here."""

import json
import subprocess
import sys
from dataclasses import asdict
from importlib.util import find_spec

import pytest

from coalign_megatron.convert import ConversionRequest, convert
from coalign_megatron.layouts.megatron import Mesh
from packages.megatron.tests.convert import made

pytestmark = [
    pytest.mark.backends,
    pytest.mark.timeout(400),
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed"),
]
JOBS = {  # each of four ranks
    "copies": (made.LLAMA, Mesh(data=4)),
    "tp2": (made.LLAMA, Mesh(tensor=2, data=2)),
    "tp4, more ranks than groups": (made.LLAMA, Mesh(tensor=4)),
    "pp2": (made.LLAMA, Mesh(pipeline=2, data=2)),
    "tp2 pp2, tied": (made.QWEN2, Mesh(tensor=2, pipeline=2)),
    "ep2": (made.MIXTRAL, Mesh(data=4, expert=2)),
    "tp2 ep2 etp2": (made.MIXTRAL, Mesh(tensor=2, data=2, expert=2, expert_tensor=2)),
}


@pytest.fixture(scope="module")
def loaded_and_saved(tmp_path_factory):
    """Of each job: what was converted (`hf`), and what megatron-core saved of it (`saved`) after it had loaded it."""
    base = tmp_path_factory.mktemp("megatron core")
    jobs = []
    for name, (hf, mesh) in JOBS.items():
        source, written = made.model(base / name / "hf", hf), base / name / "written"
        convert(ConversionRequest(source=source, output=written, to="megatron", tensor=mesh.tensor, flavour="local"))
        saved = base / name / "saved" / "iter_0000007"
        saved.mkdir(parents=True)
        (saved.parent / "latest_checkpointed_iteration.txt").write_text("7")
        jobs.append({"hf": str(source), "mesh": asdict(mesh), "load": str(written / "release"), "save": str(saved)})
    (base / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, "-m", "packages.megatron.tests.convert.mcore", str(base / "jobs.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=390)
    assert done.returncode == 0, done.stderr[-4000:]
    return base


@pytest.mark.parametrize("name", JOBS)
def test_megatron_core_loads_what_is_written_and_writes_what_is_read(tmp_path, loaded_and_saved, name):
    source = loaded_and_saved / name / "hf"
    request = ConversionRequest(
        source=source.parent / "saved", output=tmp_path / "back", to="hf", hf=source, verify=True
    )
    assert convert(request).source == "torch_dist"
    made.same(made.stored(tmp_path / "back"), made.stored(source))
