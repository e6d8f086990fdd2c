"""`coalign check-sync`: what it prints and its exit code, on directories and on the models of a run."""

import json

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from coalign.backends.engines.native.native_model import NativeModel
from coalign.cli import app
from tests.runs import settings
from tests.tiny import tiny_model_dir


def check(*arguments):
    done = CliRunner().invoke(app, ["check-sync", *map(str, arguments)])
    return done.exit_code, done.output


def test_two_directories(tmp_path):
    one, other = tiny_model_dir(tmp_path / "one"), tiny_model_dir(tmp_path / "other")
    assert check(one, other)[0] == 0
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"][:2] += 0.5
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    code, text = check(one, other)
    assert code == 1 and "2 of" in text
    assert any("model.norm.weight" in line and "0.5" in line and "2 of" in line for line in text.splitlines())
    assert "model.layers.0.mlp.up_proj.weight" in text


def test_neither_directories_nor_a_run(tmp_path):
    code, text = check(tmp_path)
    assert code == 2 and "two directories" in text


@pytest.fixture
def run_yaml(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(settings(tmp_path, "grpo")))
    return path


def test_the_models_of_a_run_agree(run_yaml):
    code, text = check("--config", run_yaml)
    assert code == 0, text
    assert "trainer and policy: all" in text and "log-probs of" in text and "fine" in text


def test_an_engine_that_computes_with_other_weights_is_found(run_yaml, monkeypatch):
    load = NativeModel.load

    def off(self, weights, *, adopt):
        weights = ((name, tensor + 1.0 if "norm" in name else tensor) for name, tensor in weights)
        load(self, weights, adopt=False)

    monkeypatch.setattr(NativeModel, "load", off)
    code, text = check("--config", run_yaml)
    assert code == 1
    assert "tensors differ" in text and "norm.weight" in text and "above the limit" in text


def test_an_algorithm_without_a_sync(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(settings(tmp_path, "sft")))
    done = CliRunner().invoke(app, ["check-sync", "--config", str(path)])
    assert done.exit_code != 0 and "no weights travel" in str(done.exception)
