"""A hub of the test's own, and a process for which it is the hub."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import HfFileSystem, constants

import coalign
from tests.hub.server import Hub, serve
from tests.tiny import tiny_model_dir


@pytest.fixture
def hub(monkeypatch, tmp_path):
    import datasets

    hub = Hub()
    server = serve(hub)
    for name, value in (
        ("ENDPOINT", hub.endpoint),
        ("HF_HOME", str(tmp_path / "hf")),
        ("HF_HUB_CACHE", str(tmp_path / "hf" / "hub")),
        ("HF_HUB_OFFLINE", False),
        ("HF_TOKEN_PATH", str(tmp_path / "hf" / "token")),
        ("HUGGINGFACE_CO_URL_TEMPLATE", hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"),
    ):
        monkeypatch.setattr(constants, name, value)
    for name, value in (
        ("HF_ENDPOINT", hub.endpoint),
        ("HUB_DATASETS_URL", hub.endpoint + "/datasets/{repo_id}/resolve/{revision}/{path}"),
        ("HF_DATASETS_CACHE", tmp_path / "hf" / "datasets"),
        ("DOWNLOADED_DATASETS_PATH", tmp_path / "hf" / "datasets" / "downloads"),
        ("HF_HUB_OFFLINE", False),
    ):
        monkeypatch.setattr(datasets.config, name, value)
    HfFileSystem.clear_instance_cache()
    monkeypatch.setenv("COALIGN_CACHE", str(tmp_path / "coalign"))
    yield hub
    server.shutdown()


def settings_of_a_run(tmp_path, model="", *, steps=2, **data):
    """A run of SFT on ``data``, from a model by its name or from a tiny one."""
    config = {
        "algorithm": "sft",
        "output": str(tmp_path / "run"),
        "data": data,
        "models": {"trainer": {"load": model or str(tiny_model_dir(tmp_path / "model"))}},
        "runtime": {"steps": steps, "prompts_per_step": 2, "trackers": [], "plots": False, "cluster": "local"},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    return tmp_path / "run.yaml"


def run_in_process(hub, tmp_path, *arguments, **environment):
    """Run `coalign` as a process for which the server is the hub."""
    own = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf")}
    own |= {"HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0"}
    return subprocess.run(
        [sys.executable, "-m", "coalign.cli", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(coalign.__file__).parents[1]), **own, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
