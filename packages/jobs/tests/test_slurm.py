"""The sbatch script, and real runs under a real Slurm: two nodes, preemption, requeue, the same weights."""

import json
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from coalign_jobs.job import plan_job
from coalign_jobs.slurm import SlurmOptions, render_sbatch
from packages.jobs.tests.conftest import write
from packages.jobs.tests.slurm_cluster import find_lack, start_slurm
from tests.runs import ROOT, metrics, run, settings, weights_hash

TRAINER = {"load": "own/model"}


def render(here, options=None, nodes=None, devices=None, overrides=(), **sections):
    job = plan_job(Path(write(here, **sections)), overrides, nodes=nodes, devices=devices, ships=False)
    script = render_sbatch(job, options or SlurmOptions())
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    return script


def read_directives(script):
    return dict(
        line.removeprefix("#SBATCH --").partition("=")[::2] for line in script.splitlines() if "#SBATCH" in line
    )


@pytest.mark.parametrize(
    ("gpus", "options", "asked"),
    [
        (0, SlurmOptions(), {"nodes": "1", "exclusive": ""}),
        (4, SlurmOptions(cores=16), {"nodes": "1", "gpus-per-node": "4", "cpus-per-task": "16"}),
        (16, SlurmOptions(gpu="a100"), {"nodes": "2", "gpus-per-node": "a100:8", "exclusive": ""}),
        (0, SlurmOptions("debug", "me", "1:00:00", extra=("--mem=0",)), {"partition": "debug", "account": "me"}),
        (0, SlurmOptions(extra=("--mem=0",)), {"mem": "0"}),
    ],
)
def test_it_asks_for_the_nodes_of_the_plan(here, gpus, options, asked):
    directives = read_directives(render(here, options, models={"trainer": {**TRAINER, "num_gpu": gpus}}))
    assert asked.items() <= directives.items()
    assert {"requeue": "", "signal": "B:USR1@120", "job-name": "first"}.items() <= directives.items()
    assert directives["output"] == "runs/first-%j.log"


def test_ray_is_raised_over_several_nodes_alone(here):
    one = render(here)
    assert "ray start" not in one and "runtime.ray_address" not in one
    several = render(here, nodes=3)
    assert " --nodes=2 --ntasks=2 " in several and "-ge 3 ]" in several and "runtime.ray_address=auto" in several
    assert "export RAY_AUTH_MODE=token" in several and "token_hex" in several


def test_devices_that_are_simulated_are_counted_by_ray(here):
    models = {"trainer": {**TRAINER, "num_gpu": 8}}
    script = render(here, devices=4, models=models, runtime={"accelerator": "chip"})
    assert """--num-gpus=0 --resources='{"chip": 4}'""" in script and "gpus-per-node" not in script


def test_settings_and_paths_keep_their_spaces(here):
    script = render(here, overrides=["output=runs/my run", "data.prompt_format={prompt} $HOME"])
    line = next(line for line in script.splitlines() if "coalign.cli train" in line)
    words = shlex.split(line.removesuffix("&"))
    assert words[3:7] == ["train", "run.yaml", "output=runs/my run", "data.prompt_format={prompt} $HOME"]


def test_the_notice_of_the_configuration_is_kept(here):
    assert "preemption_notice=120 " in render(here)
    assert "preemption_notice=30 " in render(here, runtime={"preemption_notice": 30.0})


# ---- with Slurm


@pytest.fixture(scope="module")
def slurm():
    if lack := find_lack():
        pytest.skip(lack)
    folder = tempfile.TemporaryDirectory(prefix="slurm", ignore_cleanup_errors=True)
    with folder as path, start_slurm(Path(path)) as environment:
        yield {**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def launch(slurm, config, *options):
    path = Path(config["output"]).parent / "run.yaml"
    path.write_text(json.dumps(config))
    command = [sys.executable, "-m", "coalign.cli", "launch", "slurm", str(path), "--gpus-per-node", "0", *options]
    return subprocess.run(command, env=slurm, cwd=path.parent, capture_output=True, text=True)


def ask(slurm, *command):
    return subprocess.run(command, env=slurm, capture_output=True, text=True).stdout.strip()


def wait_for(condition, log, seconds=400):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, log()
        time.sleep(1)


def two_ranks(tmp_path, steps):
    """A run with two ranks, one on each node."""
    config = settings(tmp_path, "sft", steps=steps, cluster="auto", save_every=0)
    config["models"]["trainer"] |= {"num_process": 2, "num_gpu": 0, "placement": "spread"}
    return config | {"output": str(tmp_path / "job")}


@pytest.mark.slow
def test_a_partition_that_does_not_exist_is_named_by_sbatch(slurm, tmp_path):
    done = launch(slurm, settings(tmp_path, "sft"), "--partition", "nowhere")
    assert done.returncode == 2 and done.stdout == ""
    assert "sbatch refused the job" in done.stderr and "invalid partition specified: nowhere" in done.stderr
    assert ask(slurm, "squeue", "--noheader") == ""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_preempted_run_comes_back_and_ends_with_the_weights_of_one_that_was_not(slurm, tmp_path):
    """Slurm takes the nodes for an urgent job. The run saves, waits in the queue, and goes on where it was."""
    steps = 60
    config = two_ranks(tmp_path, steps)
    submitted = launch(slurm, config, "--nodes", "2")
    number = submitted.stdout.split()[1]
    [log] = tmp_path.glob("job-*.log") or [tmp_path / f"job-{number}.log"]
    show = lambda: log.read_text() if log.exists() else submitted.stderr  # noqa: E731
    wait_for(lambda: len(metrics(config)) > 2, show)
    urgent = ["sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"]
    assert ask(slurm, *urgent)
    wait_for(lambda: not ask(slurm, "squeue", "--noheader", f"--jobs={number}"), show)
    assert "goes back into the queue" in show() and "continuing from" in show(), show()
    assert "JobState=COMPLETED Reason=None" in ask(slurm, "scontrol", "show", "job", number)
    assert [line["step"] for line in metrics(config)] == [*range(steps + 1)]
    whole = {**two_ranks(tmp_path, steps), "output": str(tmp_path / "whole")}
    assert run(whole) == 0
    assert weights_hash(config, steps) == weights_hash(whole, steps)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_exit_code_of_a_run_is_that_of_its_job(slurm, tmp_path):
    config = settings(tmp_path, "sft", steps=3)
    config["models"]["trainer"]["optimizer"] = {"lr": 1e30}  # the loss becomes NaN: guards end the run with 3
    submitted = launch(slurm, config)
    number = submitted.stdout.split()[1]
    wait_for(lambda: not ask(slurm, "squeue", "--noheader", f"--jobs={number}"), lambda: "it did not end")
    assert "ExitCode=3:0" in ask(slurm, "scontrol", "show", "job", number), submitted.stderr
