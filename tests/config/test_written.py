"""Which settings a person wrote, as opposed to defaults of the schema, of the recipe, and of another model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coalign import load_config
from coalign.config.export import list_written
from tests.runs import run, settings
from tests.tiny import tiny_model_dir

RUN = """\
include: base.yaml
algorithm: grpo
data: {train: rows.jsonl}
reward:
- math
- {fn: format, weight: 0.5}
models:
  policy:
    load: model
    sampling: {max_new_tokens: 8}
  trainer: {optimizer: {lr: 1.0e-5}}
loss: {fn: policy_gradient, kl_coef: 0.0}
"""


@pytest.fixture
def file(tmp_path):
    tiny_model_dir(tmp_path / "model", layers=1)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    (tmp_path / "base.yaml").write_text("seed: 3\nruntime: {steps: 5}\n")
    (tmp_path / "run.yaml").write_text(RUN)
    return str(tmp_path / "run.yaml")


def test_what_a_person_wrote_and_where(file):
    written = list_written(load_config(file, ["runtime.prompts_per_step=4", "runtime.trackers=[]"]))
    places = {key: Path(place).name for key, place in written.items()}
    assert places == {
        "algorithm": "run.yaml:2",
        "seed": "base.yaml:1",
        "runtime.steps": "base.yaml:2",
        "runtime.prompts_per_step": "override",
        "runtime.trackers": "override",
        "data.train[0].path": "run.yaml:3",
        "reward[0].fn": "run.yaml:5",
        "reward[1].fn": "run.yaml:6",
        "reward[1].weight": "run.yaml:6",
        "loss.fn": "run.yaml:12",
        "loss.kl_coef": "run.yaml:12",
        "models.policy.load": "run.yaml:9",
        "models.policy.sampling.max_new_tokens": "run.yaml:10",
        "models.trainer.optimizer.lr": "run.yaml:11",
    }


def test_values_of_overrides_are_not_shown(file):
    written = list_written(load_config(file, ["models.policy.load=model", "output=secret-place"]))
    assert "secret-place" not in json.dumps(written) and written["output"] == "override"


def test_a_run_says_what_was_written(tmp_path):
    config = settings(tmp_path, "sft", steps=1, eval_at_start=False)
    config["data"].pop("eval")
    assert run(config, "seed=2") == 0
    written = json.loads((tmp_path / "run" / "written.json").read_text())
    assert written["seed"] == "override" and "runtime.steps" in written and "models.trainer.optimizer.lr" in written
    assert "runtime.keep" not in written and "loss.fn" not in written
