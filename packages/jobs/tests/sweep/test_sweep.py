"""`coalign sweep` with real runs: results, early ends, failures, metrics, interruption and resumption."""

import csv
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from coalign.config import ConfigError, load_section
from coalign.config.schema import RunConfig
from coalign.report.display import Display
from coalign_jobs.sweep import sweep as module
from coalign_jobs.sweep.config import SweepConfig
from coalign_jobs.sweep.sweep import run_sweep, share_devices
from tests.runs import ROOT, metrics, settings

LR = "models.trainer.optimizer.lr"


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """``sweep(resume=False, steps=3, **settings)``: runs a sweep of an SFT run; exit code, state, what was shown.

    Its processes are forked, since a new one takes seconds to import torch.
    """
    contexts = {"spawn": multiprocessing.get_context("fork")}
    monkeypatch.setattr(module.multiprocessing, "get_context", contexts.__getitem__)

    def run(*, resume=False, steps=3, run=(), **changes):
        file = write_sweep(tmp_path, steps, run, **changes)
        display = Display(out=Console(record=True, width=160), err=Console(record=True, width=160, stderr=True))
        code = run_sweep(load_section(SweepConfig, file), display, resume=resume)
        state = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["trials"]
        return code, state, display.out.export_text() + display.err.export_text()

    return run


def read(run):
    return metrics({"output": str(run)})


def write_sweep(folder, steps, run=(), **changes):
    base = settings(folder, "sft", steps=steps, save_every=1) | dict(run)
    del base["data"]["eval"]
    (folder / "base.yaml").write_text(yaml.safe_dump(base))
    sections = {"base": "base.yaml", "output": str(folder / "sweep"), "metric": "loss/value", "mode": "min"}
    sections |= {"space": {LR: [1e-5, 3e-3]}} | changes
    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump(sections))
    return file


def test_the_best_trial_is_named_with_its_settings_and_its_model(sweep, tmp_path):
    code, trials, shown = sweep()
    folder = tmp_path / "sweep"
    assert code == 0 and [trial["status"] for trial in trials] == ["finished"] * 2
    for trial in trials:
        run = folder / f"trial_{trial['number']:03d}_lr={trial['settings'][LR]:.4g}"
        assert trial["value"] == read(run)[-1]["loss/value"] and trial["step"] == 3
    assert trials[1]["value"] < trials[0]["value"]
    assert "best: trial_001_lr=0.003" in shown and f"{LR}=0.003" in shown
    assert str(folder / "trial_001_lr=0.003" / "model") in shown
    rows = list(csv.DictReader((folder / "results.csv").open()))
    assert [float(row["loss/value"]) for row in rows] == [trial["value"] for trial in trials]
    assert all((folder / name).stat().st_size > 1000 for name in ("curves.png", "settings.png"))
    code, again, shown = sweep(resume=True)
    assert (code, again) == (0, trials) and "begins" not in shown  # nothing is run again


@pytest.mark.slow
def test_bad_trials_end_early_with_a_checkpoint(sweep, tmp_path):
    pytest.importorskip("ray.tune")
    asha = {"scheduler": "asha", "asha": {"grace_steps": 1, "reduction": 2.0}}
    code, trials, _ = sweep(steps=4, space={LR: [3e-3, 1e-9]}, **asha)
    # At step 1 both have the loss of the model; at step 2 the second one has learnt less.
    assert code == 0 and [trial["status"] for trial in trials] == ["finished", "stopped"]
    assert trials[0]["step"] == 4 and trials[1]["step"] in (1, 2)
    assert (tmp_path / "sweep" / "trial_001_lr=1e-09" / "model").exists()


@pytest.mark.slow
def test_a_trial_that_fails_says_why_and_the_others_go_on(sweep):
    space = {"models.trainer.max_tokens_per_micro": [1, 256]}
    code, trials, shown = sweep(space=space)
    assert code == 1 and [trial["status"] for trial in trials] == ["failed", "finished"]
    assert trials[0]["error"] and f"trial_000_max_tokens_per_micro=1 failed: {trials[0]['error']}"[:60] in shown
    assert "best: trial_001" in shown


@pytest.mark.slow
def test_two_trials_at_once(sweep):
    code, trials, _ = sweep(concurrent=2, steps=2)
    assert code == 0 and [trial["status"] for trial in trials] == ["finished"] * 2


def test_a_metric_that_no_trial_reports_is_named_with_those_that_exist(sweep):
    message = r"no trial reports 'loss/valu'; did you mean 'loss/value'\?; they report .*nll"
    with pytest.raises(ValueError, match=message):
        sweep(metric="loss/valu")


EPOCHS = {"runtime": {"epochs": 1, "prompts_per_step": 4, "threads": 1, "cluster": "local"}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"space": {"models.trainer.optimizer.lrr": [1, 2]}}, r"unknown key; did you mean 'lr'\?"),
        ({"space": {"seed": [1, -1]}}, r"seed: is -1"),
        ({"base": "nowhere.yaml"}, r"there is no file 'nowhere\.yaml'"),
        ({"metric": "eval/mean"}, r"comes from evaluation, and the run has no data\.eval"),
        ({"scheduler": "asha", "run": EPOCHS}, r"asha needs the number of steps of a trial: set `runtime\.steps`"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_before_anything_starts(sweep, tmp_path, changes, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        sweep(**changes)
    assert not (tmp_path / "sweep").exists()


@pytest.mark.slow
def test_a_folder_with_a_sweep_needs_to_be_resumed_by_the_same_sweep(sweep):
    sweep(steps=1)
    with pytest.raises(ValueError, match="holds a sweep: `--resume` goes on with it"):
        sweep(steps=1)
    with pytest.raises(ValueError, match="the base configuration changed"):
        sweep(steps=2, resume=True)


def test_trials_share_the_devices_out(monkeypatch):
    config = SweepConfig(base="x", metric="m", space={"a": [1]}, concurrent=2)
    run = RunConfig(algorithm="sft")
    monkeypatch.setattr(module.torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(module.torch.accelerator, "device_count", lambda: 5)
    monkeypatch.setattr(module.torch.accelerator, "current_accelerator", lambda: module.torch.device("cuda"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert share_devices(config, run) == [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")  # the others of the machine are somebody else's
    assert share_devices(config, run) == [{"CUDA_VISIBLE_DEVICES": "4,5"}, {"CUDA_VISIBLE_DEVICES": "6,7"}]
    with pytest.raises(ValueError, match="concurrent: 6 trials at once, and this machine has 5 cuda devices"):
        share_devices(config.model_copy(update={"concurrent": 6}), run)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_interrupted_sweep_goes_on_from_checkpoints(tmp_path, sweep):
    whole = write_sweep(tmp_path, 20, space={LR: [1e-3]})
    command = [sys.executable, "-m", "coalign.cli", "sweep", str(whole)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    run = tmp_path / "sweep" / "trial_000_lr=0.001"
    deadline = time.monotonic() + 200
    while not ((run / "metrics.jsonl").exists() and len(read(run)) > 2):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    _, said = process.communicate(timeout=100)
    assert process.returncode == 130 and "`--resume` goes on from the checkpoints" in said
    [trial] = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["trials"]
    assert trial["status"] == "waiting" and 2 < trial["step"] < 20
    code, [trial], shown = sweep(steps=20, space={LR: [1e-3]}, resume=True)
    assert code == 0 and trial["status"] == "finished" and trial["step"] == 20 and "goes on" in shown
    assert [row["step"] for row in read(run)] == list(range(1, 21))
    alone = Path(f"{tmp_path}/sweep").rename(tmp_path / "before") / run.name
    _, [uninterrupted], _ = sweep(steps=20, space={LR: [1e-3]})
    assert uninterrupted["value"] == trial["value"] == read(alone)[-1]["loss/value"]
