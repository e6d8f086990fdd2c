"""The archives hold what they should, and a wheel that is installed elsewhere works; packages that are not there."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import tarfile
import zipfile

import pytest

from coalign.report import plots
from tests.packaging.installation import build_archives, run, try_commands
from tests.packaging.licences import ROOT
from tests.packaging.test_metadata import read_git_files
from tests.runs import run as train
from tests.runs import settings


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


def test_without_matplotlib_a_run_says_so_and_draws_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    config = settings(tmp_path, "sft", steps=1, plots=True)
    with caplog.at_level(logging.WARNING, "coalign"):
        assert train(config) == 0
    assert "no curves will be drawn" in caplog.text and "pip install 'coalign[plots]'" in caplog.text
    assert not (tmp_path / "run" / "plots").exists()
    with pytest.raises(ImportError, match=r"coalign\[plots\]"):
        plots.new_figure("Reward", "")


@pytest.mark.parametrize("package", ["uvicorn", "starlette"])
def test_without_its_packages_a_server_names_the_extra(monkeypatch, package):
    for module in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    spec = importlib.util.spec_from_file_location("server_without_packages", ROOT / "coalign" / "http_server.py")
    assert spec and spec.loader
    with pytest.raises(
        ImportError, match=rf"needs {package}.*, which is not installed: pip install 'coalign\[serve\]'"
    ):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
