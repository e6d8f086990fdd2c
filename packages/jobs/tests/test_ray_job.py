"""Jobs of a Ray cluster: what is submitted, what is refused, and real jobs on a cluster of this machine."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import yaml

from coalign.api import load_config
from coalign_jobs.job import plan_job
from coalign_jobs.ray import RayOptions, render_submission, submit_job
from coalign_jobs.shipment import list_shipment
from packages.jobs.tests.conftest import refused_in_one_line, write
from tests.runs import ROOT, metrics, run, settings, weights_hash

OPTIONS = RayOptions("http://127.0.0.1:8265")


def plan(here, overrides=(), **sections):
    return plan_job(Path(write(here, **sections)), overrides, sized=False, ships=True)


def test_the_submission_has_the_command_and_the_environment(here):
    submission = yaml.safe_load(render_submission(plan(here, ["runtime.steps=7"]), OPTIONS))
    assert submission["entrypoint"] == (
        f"python -m coalign.cli train run.yaml runtime.steps=7 runtime.ray_address=auto output={here}/runs/first"
    )
    assert submission["runtime_env"]["working_dir"] == str(here)
    variables = submission["runtime_env"]["env_vars"]
    assert variables["PYTHONUNBUFFERED"] == "1" and not any(name.startswith("RAY_") for name in variables)


def test_inputs_that_do_not_travel_are_named_by_their_whole_paths(here, monkeypatch):
    (here / "runs").mkdir()
    (here / "runs" / "rows.jsonl").write_text('{"text": "a"}\n')
    job = plan(here, data={"train": ["rows.jsonl", "runs/rows.jsonl"]})
    text = render_submission(job, OPTIONS)
    [*_, setting] = shlex.split(yaml.safe_load(text)["entrypoint"])
    assert setting == f"data.train[1].path={here}/runs/rows.jsonl"
    monkeypatch.chdir("/")
    read = load_config(here / "run.yaml", [setting], planned=True)
    assert [source.path for source in read.data.train] == [f"{here}/rows.jsonl", f"{here}/runs/rows.jsonl"]
    assert f"# {here}/runs/rows.jsonl does not travel: every node has to have it there" in text


def test_values_of_secrets_are_not_printed(here, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "hunter2-hunter2")
    trackers = [{"name": "wandb", "project": "${env:MY_TOKEN}"}]
    text = render_submission(plan(here, runtime={"trackers": trackers}), OPTIONS)
    assert "hunter2" not in text and yaml.safe_load(text)["runtime_env"]["env_vars"]["MY_TOKEN"] == "${MY_TOKEN}"


def test_an_address_that_does_not_answer_is_one_line(here):
    for address in ("http://127.0.0.1:1", "127.0.0.1:1"):
        with refused_in_one_line("no Ray dashboard answers at http://127.0.0.1:1"):
            submit_job(plan(here), RayOptions(address))
    with pytest.raises(ValueError, match="is no address of Ray's dashboard"):
        submit_job(plan(here), RayOptions("ray://127.0.0.1:10001"))


def test_without_the_dashboard_the_extra_is_named(here, monkeypatch):
    monkeypatch.setattr("coalign_jobs.ray.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'coalign\[jobs\]'"):
        submit_job(plan(here), OPTIONS)


def test_a_cluster_that_has_just_started_is_waited_for(monkeypatch):
    from coalign_jobs import ray_client as jobs

    asked = []

    class Dashboard:
        def submit_job(self, **job):
            asked.append(job["metadata"])
            if len(asked) < 3 or job["entrypoint"] == "never":
                raise RuntimeError("Request failed: No available agent to submit job, try again\nx")
            return "job-1"

    client = jobs.RayJobClient.__new__(jobs.RayJobClient)
    client.address, client._client = "http://head:8265", Dashboard()
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0)
    assert client.submit("run", "true", "file:///code.zip", {}) == "job-1" and asked == [{"name": "run"}] * 3
    monkeypatch.setattr(jobs, "AGENT_SECONDS", -1)
    with pytest.raises(ValueError, match=r"^no node of http://head:8265 starts jobs: .*No available agent.*again$"):
        client.submit("run", "never", "file:///code.zip", {})


# ---- with Ray


@pytest.fixture(scope="module")
def cluster():
    """A Ray cluster with a token, in a process group of its own: `ray stop` would end those of other runs, too."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        token = Path(folder, "token")
        token.write_text("a" * 64)
        ports = []
        for _ in range(3):
            with socket.create_server(("127.0.0.1", 0)) as probe:
                ports.append(probe.getsockname()[1])
        environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        environment |= {
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HF_HUB_OFFLINE": "1",
        }
        environment |= {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
        command = ["ray", "start", "--head", "--block", "--node-ip-address=127.0.0.1", "--num-cpus=4"]
        command += [f"--port={ports[0]}", f"--dashboard-port={ports[1]}", f"--ray-client-server-port={ports[2]}"]
        command += [f"--temp-dir={folder}", "--min-worker-port=0", "--max-worker-port=0"]
        with open(Path(folder, "ray.log"), "w") as log:
            head = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            end = time.monotonic() + 150
            while "Ray runtime started" not in Path(folder, "ray.log").read_text():
                assert time.monotonic() < end and head.poll() is None, Path(folder, "ray.log").read_text()
                time.sleep(0.5)
            yield f"http://127.0.0.1:{ports[1]}", token
        finally:
            head.terminate()
            try:
                head.wait(30)
            finally:
                os.killpg(head.pid, signal.SIGKILL)


def launch(cluster, folder, config, *options, token=None):
    address, file = cluster
    (folder / "run.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-m", "coalign.cli", "launch", "ray", "run.yaml", "--address", address]
    command += ["--token-file", str(token or file), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_ends_with_the_weights_of_coalign_train(cluster, tmp_path, monkeypatch):
    """Its reward is a module of the working directory, which no path of the cluster leads to."""
    config = settings(tmp_path, "grpo", steps=2)
    config["reward"] = {"fn": "my_rewards:score"}
    project = tmp_path / "project"
    project.mkdir()
    (project / "my_rewards.py").write_text(
        "def score(sample):\n    return sum(c.isdigit() for c in sample.response) / (1 + len(sample.response))\n"
    )
    job = launch(cluster, project, config | {"output": "runs/job"})
    assert job.returncode == 0, job.stdout + job.stderr
    assert "step 2/2" in job.stdout and "ray job stop raysubmit_" in job.stderr
    config |= {"output": str(project / "runs" / "job")}
    assert [line["step"] for line in metrics(config)][-1] == 2
    monkeypatch.syspath_prepend(str(project))
    whole = config | {"output": str(tmp_path / "whole")}
    assert run(whole) == 0
    assert weights_hash(config, 2) == weights_hash(whole, 2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_exit_code_of_a_job_is_kept(cluster, tmp_path):
    config = settings(tmp_path, "sft", steps=3)
    config["models"]["trainer"]["optimizer"] = {"lr": 1e30}  # the loss becomes NaN: guards end the run with 3
    job = launch(cluster, tmp_path, config)
    assert job.returncode == 3, job.stdout + job.stderr


@pytest.mark.slow
def test_a_wrong_token_is_one_line_and_starts_nothing(cluster, tmp_path):
    wrong = tmp_path / "wrong"
    wrong.write_text("b" * 64)
    job = launch(cluster, tmp_path, settings(tmp_path, "sft"), token=wrong)
    assert job.returncode == 2 and job.stdout == "", job.stdout + job.stderr
    assert "refuses the token of" in job.stderr and str(wrong) in job.stderr and len(job.stderr.splitlines()) == 1


SUBMIT_WITH_A_FILE = """
import sys
from coalign_jobs.ray_client import RayJobClient
address, archive = sys.argv[1:]
client = RayJobClient(address)
ask = "ray.get(ray.remote(lambda: __import__('mine').value).remote())"
command = f'python -c "import mine, ray; ray.init(\\'auto\\'); print(mine.value, {ask})"'
number = client.submit("archive", command, f"file://{archive}", {})
client.follow(number, sys.stdout.write)
sys.exit(client.wait(number))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ray_unpacks_the_archive_that_a_rayjob_names(cluster, tmp_path):
    """KubeRay's pods have the code as a zip file of each node (`file://`): the head's and the workers' see it."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "mine.py").write_text("value = 41\n")
    archive = tmp_path / "code.zip"
    archive.write_bytes(list_shipment(project).pack(2**20))
    address, token = cluster
    command = [sys.executable, "-c", SUBMIT_WITH_A_FILE, address, str(archive)]
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "PYTHONPATH": str(ROOT)}
    job = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert job.returncode == 0 and "41 41" in job.stdout, job.stdout + job.stderr
