"""What travels of a working directory, and which code of a run would be missing."""

import zipfile
from io import BytesIO
from pathlib import Path

import pytest

from coalign_jobs.job import plan_job
from coalign_jobs.shipment import MAX_FILE_BYTES, list_shipment
from packages.jobs.tests.conftest import write

GRPO = {"algorithm": "grpo", "models": {"policy": {"load": "own/model", "num_gpu": 0}}}


def test_code_travels_and_results_environments_and_large_files_stay(here):
    for name in ("mine.py", "pkg/inner.py", "runs/first/log.txt", ".git/config", "pkg/__pycache__/x.pyc", "venv/bin/x"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text("x")
    (here / "venv" / "pyvenv.cfg").write_text("")
    (here / "weights.bin").write_bytes(b"0" * (MAX_FILE_BYTES + 1))
    (here / "link.py").symlink_to(here / "mine.py")
    shipment = list_shipment(here)
    assert [str(file) for file in shipment.files] == ["mine.py", "rows.jsonl", "pkg/inner.py"]
    assert [str(file) for file in shipment.large] == ["weights.bin"]
    assert "not with it (over 10.0 MiB): weights.bin" in shipment.describe()


def test_the_same_files_are_the_same_archive(here):
    program = here / "run.sh"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    first = list_shipment(here).pack(2**20)
    program.touch()
    assert list_shipment(here).pack(2**20) == first
    entry = zipfile.ZipFile(BytesIO(first)).getinfo("run.sh")
    assert entry.external_attr >> 16 & 0o777 == 0o755


def plan(here, **sections):
    return plan_job(Path(write(here, **sections)), [], ships=True)


def test_rewards_and_recipes_of_the_directory_travel(here):
    (here / "pkg").mkdir()
    (here / "pkg" / "__init__.py").write_text("")
    (here / "pkg" / "rewards.py").write_text("")
    (here / "mine.py").write_text("")
    job = plan(here, **GRPO, reward=[{"fn": "pkg.rewards:score"}, {"fn": "mine:mark"}, {"fn": "json:loads"}])
    assert job.shipment is not None and Path("pkg/rewards.py") in job.shipment.files


def test_code_of_elsewhere_is_refused_with_its_place(here, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "other_rewards.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    with pytest.raises(ValueError) as refused:
        plan(here, **GRPO, reward={"fn": "other_rewards:score"})
    said = str(refused.value)
    assert said.startswith("run.yaml:1: reward[0].fn: other_rewards:score: its module is ") and "\n" not in said
    assert f"{tmp_path}/elsewhere/other_rewards.py, and only {here} travels with the job" in said
    with pytest.raises(ValueError, match="missing_rewards:score: no such module here"):
        plan(here, **GRPO, reward={"fn": "missing_rewards:score"})


def test_code_in_a_folder_that_stays_is_refused(here, tmp_path, monkeypatch):
    """Also where another folder of that name is on the path: to Python each is a package."""
    (here / "runs").mkdir()
    (here / "runs" / "rewards.py").write_text("")
    (tmp_path / "elsewhere" / "runs").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    with pytest.raises(ValueError, match=r"runs\.rewards:score: no such module here"):
        plan(here, **GRPO, reward={"fn": "runs.rewards:score"})


def test_a_configuration_of_elsewhere_is_refused(here, tmp_path):
    write(here)
    (tmp_path / "base.yaml").write_text("seed: 3\n")
    (here / "second.yaml").write_text(
        f"include: {tmp_path}/base.yaml\nalgorithm: sft\nmodels: {{trainer: {{num_gpu: 0}}}}\n"
    )
    with pytest.raises(ValueError, match=r"base\.yaml is outside of"):
        plan_job(Path("second.yaml"), ["data.train=rows.jsonl"], ships=True)
    (here / "runs").mkdir()
    (here / "run.yaml").rename(here / "runs" / "run.yaml")
    with pytest.raises(ValueError, match="is in a folder that does not travel"):
        plan_job(Path("runs/run.yaml"), [], ships=True)
