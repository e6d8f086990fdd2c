"""What a machine without an optional package is told: one line that names the extra."""

from __future__ import annotations

import importlib.util
import logging
import sys

import pytest

from coalign.report import plots
from coalign_prepare import gguf
from tests.packaging.licences import ROOT
from tests.runs import run, settings


def test_without_matplotlib_a_run_says_so_and_draws_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    config = settings(tmp_path, "sft", steps=1, plots=True)
    with caplog.at_level(logging.WARNING, "coalign"):
        assert run(config) == 0
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


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_without_its_packages_a_gguf_file_names_the_extra(monkeypatch, tmp_path, package):
    find = importlib.util.find_spec
    monkeypatch.setattr(gguf.importlib.util, "find_spec", lambda name: None if name == package else find(name))
    with pytest.raises(ValueError, match=rf"need {package}, which is not installed: pip install 'coalign\[gguf\]'"):
        gguf.convert_gguf(tmp_path / "model.gguf", tmp_path / "model")
