"""A directory with a configuration and people's own code, as the current one."""

import json
from contextlib import contextmanager
from pathlib import Path

import pytest


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """An empty directory with data and a model's name, the current one while a test runs."""
    directory = tmp_path / "project"
    directory.mkdir()
    (directory / "rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    monkeypatch.chdir(directory)
    return directory


@contextmanager
def refused_in_one_line(said: str):
    """What is done within this context is refused by a line that holds ``said``."""
    with pytest.raises(ValueError) as refused:
        yield
    assert said in str(refused.value) and "\n" not in str(refused.value)


def write(directory: Path, algorithm: str = "sft", **sections) -> str:
    """Write run.yaml, and return its name: a trainer with ``num_gpu`` 0 unless the sections say otherwise."""
    config = {
        "algorithm": algorithm,
        "output": "runs/first",
        "data": {"train": "rows.jsonl", "chat_template": "none"},
        "models": {"trainer": {"load": "own/model", "num_gpu": 0}},
    }
    if algorithm == "grpo":
        config["models"] = {"policy": {"load": "own/model", "num_gpu": 0}}
        config["reward"] = {"fn": "math"}
    (directory / "run.yaml").write_text(json.dumps(config | sections))
    return "run.yaml"
