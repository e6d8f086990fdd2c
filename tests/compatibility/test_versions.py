"""What earlier versions wrote is read by this one: the YAML of every recipe, and the folder of a run."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from coalign import load_config
from coalign_prepare.run_template import DATA, MODEL, REWARD
from tests.runs import metrics, run

HERE = Path(__file__).parent
VERSIONS = sorted(path for path in HERE.iterdir() if path.is_dir() and path.name[0].isdigit())
FILES = [file for version in VERSIONS for file in sorted(version.glob("init*/*.yaml"))]


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.parent.name}-{file.parent.name}-{file.stem}")
def test_the_yaml_of_a_version_is_read(file, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    text = file.read_text(encoding="utf-8")
    for needed, value in {DATA: tmp_path / "rows.jsonl", MODEL: tmp_path, REWARD: "math"}.items():
        text = text.replace(needed, str(value))
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    config = load_config(tmp_path / "run.yaml")
    assert config.algorithm == file.stem
    for name, model in yaml.safe_load(text)["models"].items():
        assert name in config.models
        assert "load" not in model or config.models[name].load == model["load"]


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.name)
def test_the_run_of_a_version_is_continued(version, tmp_path, monkeypatch, caplog):
    shutil.copytree(version, tmp_path / "here", symlinks=True, ignore=shutil.ignore_patterns("init*"))
    monkeypatch.chdir(tmp_path / "here")
    config = yaml.safe_load(Path("run.yaml").read_text(encoding="utf-8"))
    before = metrics(config)
    assert [line["step"] for line in before] == [1, 2]
    with caplog.at_level(logging.INFO, "coalign"):
        assert run(config) == 0
    assert "continuing from run/checkpoints/step_2" in caplog.text
    assert "settings that differ" not in caplog.text
    after = metrics(config)
    assert after[:2] == before and [line["step"] for line in after] == [1, 2, 3, 4]
    assert all(line["loss/value"] == line["loss/value"] for line in after)
    model = AutoModelForCausalLM.from_pretrained("run/model")
    assert len(AutoTokenizer.from_pretrained("run/model")) <= model.config.vocab_size
