"""`coalign launch`: every target prints what it would submit; what is wrong is one line, and nothing starts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coalign.cli import app
from coalign_jobs.job import plan_job
from coalign_jobs.kuberay import apply_rayjob
from coalign_jobs.skypilot import launch_task
from coalign_jobs.slurm import submit_sbatch
from packages.jobs.tests.conftest import refused_in_one_line, write
from tests.runs import ROOT

TARGETS = {
    "ray": "address: http://127.0.0.1:8265\n",
    "kuberay": "kind: RayJob\n",
    "slurm": "#SBATCH --requeue\n",
    "skypilot": "num_nodes: 1\n",
    "torchrun": "torch.distributed.run --standalone",
}
PROGRAMS = {  # that a target needs on this machine
    "kubectl": lambda job: apply_rayjob(job, ""),
    "sbatch": lambda job: submit_sbatch(job, ""),
    "sky": lambda job: launch_task(job, ""),
}


def invoke(*words):
    return CliRunner().invoke(app, ["launch", *words])


@pytest.mark.parametrize("target", TARGETS)
def test_a_dry_run_prints_and_starts_nothing(here, target, monkeypatch):
    data = {"train": "rows.jsonl", "chat_template": "none"}
    name = write(here, data=data)
    before = sorted(here.rglob("*"))
    monkeypatch.setattr("subprocess.Popen", None)
    monkeypatch.setattr("os.execve", None)
    done = invoke(target, name, "runtime.steps=3", "--dry-run")
    assert done.exit_code == 0, done.output
    assert TARGETS[target] in done.stdout and "runtime.steps=3" in done.stdout
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize("target", TARGETS)
def test_a_wrong_key_is_named_before_anything_starts(here, target):
    done = invoke(target, write(here), "runtime.stepz=3")
    assert done.exit_code and "runtime.stepz: unknown key; did you mean 'steps'?" in str(done.exception)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_that_is_missing_is_one_line(here, monkeypatch, program):
    monkeypatch.setenv("PATH", "/nowhere")
    job = plan_job(Path(write(here)), [], ships=program == "sky")
    with refused_in_one_line(f"`{program}` is not "):
        PROGRAMS[program](job)


@pytest.mark.parametrize("target", ["kuberay", "slurm", "skypilot"])
def test_gpus_that_do_not_fit_a_node_are_refused(here, target):
    models = {"trainer": {"load": "own/model", "num_gpu": 8, "tensor_parallel": 8}}
    done = invoke(target, write(here, models=models), "--gpus-per-node", "4", "--dry-run")
    assert done.exit_code and "some of which have to be on one node" in str(done.exception)
    assert len(str(done.exception).splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_a_dry_run_imports_nothing_heavy(tmp_path, target):
    config = {"algorithm": "grpo", "output": "runs/a", "reward": {"fn": "math"}, "data": {"train": "rows.jsonl"}}
    config["models"] = {"policy": {"load": "own/model", "num_gpu": 8}}
    config["runtime"] = {"colocation": [["policy", "trainer"]]}
    if target == "torchrun":
        config = {"algorithm": "sft", "data": config["data"], "models": {"trainer": config["models"]["policy"]}}
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    (tmp_path / "rows.jsonl").write_text("{}\n")
    options = {"skypilot": ["--gpu", "H100"]}.get(target, [])
    command = [sys.executable, "-X", "importtime", "-m", "coalign.cli", "launch", target, "run.yaml", "--dry-run"]
    environment = {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run([*command, *options], cwd=tmp_path, env=environment, check=True, capture_output=True)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in ran.stderr.decode().splitlines()}
    assert "coalign" in imported and not imported & {"ray", "transformers", "vllm"}  # the plan of the run needs torch
