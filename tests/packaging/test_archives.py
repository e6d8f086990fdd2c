"""The archives hold every file that they should, and a wheel that is installed elsewhere works."""

from __future__ import annotations

import os
import sys
import tarfile
import zipfile

import pytest

from tests.packaging.installation import build_archives, run, try_commands
from tests.packaging.test_metadata import read_git_files


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_archives_are_whole_and_the_wheel_works_elsewhere(tmp_path):
    (tmp_path / "archives").mkdir()
    wheel, archive = build_archives(tmp_path / "archives")
    with zipfile.ZipFile(wheel) as file:
        packed = {name for name in file.namelist() if ".dist-info/" not in name}
    assert packed == set(read_git_files("coalign"))
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    left_out = (".ci/", ".github/", ".dockerignore", ".gitignore", ".pre-commit-config.yaml")
    assert not [name for name in read_git_files(".") if name not in names and not name.startswith(left_out)]

    target, work = tmp_path / "installed", tmp_path / "work"
    work.mkdir()
    run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)], work)
    environment = {**os.environ, "PYTHONPATH": str(target), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    where = run([sys.executable, "-c", "import coalign; print(coalign.__file__)"], work, environment)
    assert where.startswith(str(target))
    assert try_commands(work, [sys.executable, "-m", "coalign.cli"], environment).startswith("coalign ")
