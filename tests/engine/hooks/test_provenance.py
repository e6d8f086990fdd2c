"""What a resumed run says about settings, code, models and data that are not what the checkpoint was made with."""

import json
import logging
import shutil
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

import pytest

from coalign import load_config
from coalign.engine.hooks.provenance import Provenance, hash_model
from tests.runs import other_model, run, settings, weights_hash


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    """The folder of a run of two steps, with its model and data, and a copy of it; the configuration."""
    home, copy = (tmp_path_factory.mktemp("provenance") / name for name in ("home", "copy"))
    home.mkdir()
    config = settings(home, "sft", steps=2, eval_at_start=False)
    run(config)
    shutil.copytree(home, copy, symlinks=True)
    return home, copy, config


@pytest.fixture
def begun(first_run, caplog):
    """A run of two steps, to be continued to three."""
    home, copy, config = first_run
    shutil.rmtree(home)
    shutil.copytree(copy, home, symlinks=True)
    caplog.set_level(logging.WARNING)
    return deepcopy(config) | {"runtime": config["runtime"] | {"steps": 3}}


@contextmanager
def no_models():
    """A run that starts models fails."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coalign.launch.run.start_cluster", lambda *_: pytest.fail("models are started"))
        yield


def test_changed_settings_are_refused_before_models_load_until_they_are_allowed(begun, caplog):
    before = (Path(begun["output"]) / "config.yaml").read_text()
    begun["models"]["trainer"]["optimizer"]["lr"] = 1e-3
    begun["runtime"] |= {"prompts_per_step": 3, "keep": 5}
    with no_models(), pytest.raises(ValueError, match="holds a run with other settings") as refused:
        run(begun)
    said = str(refused.value)
    assert said.splitlines()[1:3] == [
        "  models.trainer.optimizer.lr: 0.003 → 0.001",
        "  runtime.prompts_per_step: 4 → 3",
    ]
    assert "`output=…`" in said and "`runtime.resume=never`" in said and len(said.splitlines()) == 4
    assert (Path(begun["output"]) / "config.yaml").read_text() == before
    assert run(begun, "runtime.allow_changed=settings") == 0
    assert (Path(begun["output"]) / "config.1.yaml").read_text() == before
    [line] = [record.message for record in caplog.records if "differ" in record.message]
    assert line.splitlines() == [
        "settings that differ from the checkpoint's:",
        "  models.trainer.optimizer.lr: 0.003 → 0.001",
        "  runtime.prompts_per_step: 4 → 3",
        "  runtime.steps: 2 → 3",
    ]


def test_a_setting_that_the_checkpoint_did_not_know_counts_as_its_default(begun, caplog):
    made = Provenance(load_config(begun))
    record = json.loads(json.dumps(made.state_dict()))
    for name in ("models.trainer.rows", "models.trainer.optimizer.lr"):
        del record["settings"][name]
    with pytest.raises(ValueError, match=r"settings:\n  models\.trainer\.optimizer\.lr: not set → 0\.003\nTrain"):
        made.compare(record)


def test_a_finished_run_says_so_and_loads_no_models(begun, caplog):
    with no_models():
        assert run(begun, "runtime.steps=2", "models.trainer.max_tokens_per_micro=128") == 0
    assert "this run is finished" in caplog.text and "step 2 of 2" in caplog.text and "`runtime.steps`" in caplog.text


def test_a_reward_that_was_edited_is_listed(tmp_path, caplog, monkeypatch):
    source = tmp_path / "rewarding.py"
    source.write_text("def some(sample): return 1.0 * len(sample.response)")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = settings(tmp_path, "grpo", steps=1, eval_at_start=False) | {"reward": {"fn": "rewarding:some"}}
    run(config)
    source.write_text("def some(sample): return 2.0 * len(sample.response)")
    config["runtime"]["steps"] = 2
    assert run(config) == 0
    assert "reward[0].fn (source)" in caplog.text and "runtime.steps: 1 → 2" in caplog.text


def test_a_model_that_was_replaced_is_refused_until_it_is_allowed(begun, tmp_path, caplog):
    weights = Path(begun["models"]["trainer"]["load"]) / "model.safetensors"
    shutil.copy(other_model(tmp_path / "other", seed=9, layers=1) / "model.safetensors", weights)
    with pytest.raises(
        ValueError, match=r"other contents of models\.trainer\.load \(.*/model\).*`runtime\.allow_changed"
    ):
        run(begun)
    assert run(begun, "runtime.allow_changed=models") == 0
    assert "models with other contents than the checkpoint was made with: models.trainer.load" in caplog.text
    caplog.clear()
    begun["runtime"]["steps"] = 4
    assert run(begun) == 0 and "models" not in caplog.text  # a newer checkpoint knows them


def test_a_model_that_was_moved_is_not_refused(begun, tmp_path):
    moved = shutil.copytree(begun["models"]["trainer"]["load"], tmp_path / "moved")
    (moved / "README.md").write_text("A model.")
    begun["models"]["trainer"]["load"] = str(moved)
    assert run(begun) == 0


def test_rows_that_were_rewritten_are_refused_until_they_are_allowed(begun, caplog):
    data = Path(begun["data"]["train"])
    data.write_text(data.read_text().replace("7", "8"))
    with pytest.raises(ValueError, match=r"sft\.jsonl is not the data .*`runtime\.allow_changed: \[data\]`"):
        run(begun)
    assert run(begun, "runtime.allow_changed=data") == 0
    assert "the run goes on at the same row" in caplog.text and "data.eval[0] (contents)" in caplog.text


def test_a_checkpoint_without_a_record_is_accepted(begun, caplog):
    [checkpoint] = (Path(begun["output"]) / "checkpoints").glob("step_*")
    state = json.loads((checkpoint / "state.json").read_text())
    del state["hooks"]["Provenance"]
    (checkpoint / "state.json").write_text(json.dumps(state))
    (checkpoint / "manifest.json").write_text('{"files": {}}')
    assert run(begun) == 0 and weights_hash(begun, 3)
    assert caplog.text.count("has no record of settings and models") == 1


def test_the_hash_of_a_model(tmp_path):
    model = other_model(tmp_path / "model")
    before = hash_model(model)
    (model / ".cache").write_text("x")
    assert hash_model(model) == before
    (model / "config.json").write_text((model / "config.json").read_text() + " ")
    assert hash_model(model) != before


def test_secrets_of_the_environment_stay_out_of_checkpoints(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "hunter2-hunter2")
    config = settings(tmp_path, "sft")
    config["data"]["system"] = "${env:MY_API_KEY}"
    kept = json.dumps(Provenance(load_config(config)).state_dict())
    assert "hunter2" not in kept and "${env:MY_API_KEY}" in kept
