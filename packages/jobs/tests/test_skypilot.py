"""The task of SkyPilot: machines, code, run folder; what it refuses."""

import subprocess
from pathlib import Path

import pytest
import yaml

from coalign_jobs.job import plan_job
from coalign_jobs.skypilot import SkyPilotOptions, render_task
from packages.jobs.tests.conftest import refused_in_one_line, write

TRAINER = {"load": "own/model"}


def render(here, options=None, nodes=None, devices=None, **sections):
    data = {"train": "https://host/rows.jsonl", "chat_template": "none"}
    job = plan_job(Path(write(here, **{"data": data, **sections})), [], nodes=nodes, devices=devices, ships=True)
    text = render_task(job, options or SkyPilotOptions())
    task = yaml.safe_load(text)
    subprocess.run(["bash", "-n"], input=task["run"], text=True, check=True)
    return text, task


def test_machines_are_the_nodes_of_the_plan(here):
    _, task = render(here)
    assert task["num_nodes"] == 1 and "resources" not in task and task["workdir"] == "."
    assert task["run"] == "python -m coalign.cli train run.yaml\n"
    models = {"trainer": {**TRAINER, "num_gpu": 16}}
    _, task = render(here, SkyPilotOptions(gpu="H100", bucket="s3://mine"), models=models)
    assert task["num_nodes"] == 2 and task["resources"] == {"accelerators": "H100:8"}
    assert task["file_mounts"] == {"/coalign-runs": {"source": "s3://mine", "mode": "MOUNT_CACHED"}}
    assert "output=/coalign-runs/runs/first runtime.ray_address=auto" in task["run"] and "start_ray head" in task["run"]
    assert task["secrets"] == {"RAY_AUTH_TOKEN": None}


def test_sky_itself_takes_the_task(here, monkeypatch):
    sky = pytest.importorskip("sky", reason="SkyPilot is not installed")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "x")
    options = SkyPilotOptions("H100", "aws", "16+", "coalign:cuda", "s3://mine", spot=True)
    _, task = render(here, options, models={"trainer": {**TRAINER, "num_gpu": 16}})
    assert sky.Task.from_yaml_config(task).num_nodes == 2


def test_spot_machines_get_time_to_save(here):
    _, task = render(here, SkyPilotOptions(bucket="s3://mine", spot=True))
    assert task["resources"] == {"use_spot": True, "job_recovery": {"strategy": "EAGER_NEXT_REGION"}}
    assert "runtime.preemption_notice=25" in task["run"]


def test_secrets_are_named_and_never_written(here, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "hunter2-hunter2")
    text, task = render(here, runtime={"trackers": [{"name": "wandb", "project": "${env:MY_TOKEN}"}]})
    assert "hunter2" not in text and task["secrets"] == {"MY_TOKEN": None}


@pytest.mark.parametrize(
    ("options", "sections", "said"),
    [
        (SkyPilotOptions(), {"models": {"trainer": {**TRAINER, "num_gpu": 8}}}, "--gpu: the run needs 8 per machine"),
        (SkyPilotOptions("H100"), {"models": {"trainer": {**TRAINER, "num_gpu": 16}}}, "--bucket: 2 machines share"),
        (SkyPilotOptions(spot=True), {}, "--spot: a machine that is taken away takes its disk along"),
        (SkyPilotOptions(), {"data": {"train": "runs/a.jsonl"}}, "runs/a.jsonl is too large, or in a folder that sta"),
    ],
)
def test_what_cannot_work_is_one_line(here, options, sections, said):
    (here / "runs").mkdir()
    (here / "runs" / "a.jsonl").write_text("{}\n")
    with refused_in_one_line(said):
        render(here, options, **sections)
