"""Runs without Ray: the processes of torchrun are the ranks of one model, and end with the weights of a run on Ray."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coalign.cluster.torchrun import TOKEN, TorchrunRank
from coalign_jobs.job import plan_job
from coalign_jobs.torchrun import TorchrunOptions, render_torchrun, run_torchrun
from packages.jobs.tests.conftest import refused_in_one_line, write
from tests.runs import ROOT, metrics, run, settings, weights_hash

TRAINER = {"load": "own/model", "num_gpu": 0, "num_process": 2}
UNEQUAL = {"trainer": {**TRAINER, "num_process": 4}, "reference": {"num_process": 2}}


def plan(here, nodes=1, devices=None, algorithm="sft", **sections):
    name = write(here, algorithm, **{"models": {"trainer": TRAINER}, **sections})
    return plan_job(Path(name), [], nodes=nodes, devices=devices, stacked=True, ships=False)


def render(here, options=None, **keywords):
    script = render_torchrun(plan(here, **keywords), options or TorchrunOptions())
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    return script


def test_it_starts_a_process_for_each_rank(here):
    script = render(here)
    assert "--standalone --nproc-per-node=2 -m coalign.cli train run.yaml runtime.cluster=torchrun" in script
    eight = render(here, algorithm="dpo", models={"trainer": {"load": "own/model", "num_gpu": 8}})
    assert "--nproc-per-node=8" in eight
    auto = render(here, devices=4, models={"trainer": {"load": "own/model"}})
    assert "--nproc-per-node=4" in auto


def test_each_of_several_machines_has_a_number(here):
    script = render(here, TorchrunOptions(1, "first:1234"), nodes=2)
    assert "--nnodes=2 --node-rank=1 --master-addr=first --master-port=1234 --nproc-per-node=1" in script
    assert TOKEN in script  # asked for, never written


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"algorithm": "grpo", "models": {"policy": TRAINER}, "reward": {"fn": "math"}}, "samples while it trains"),
        ({"nodes": 2}, "2 machines: call this on each, with --address HOST"),
        ({"nodes": 3}, "2 processes do not divide over 3 machines"),
        ({"algorithm": "dpo", "models": UNEQUAL}, "models.reference: has 2 processes, and others have 4"),
    ],
)
def test_what_torchrun_cannot_run_is_one_line(here, keywords, said):
    with refused_in_one_line(said):
        render(here, **keywords)


def test_several_machines_need_a_secret(here, monkeypatch):
    monkeypatch.delenv(TOKEN, raising=False)
    with pytest.raises(ValueError, match=f"{TOKEN} is not set"):
        run_torchrun(plan(here, nodes=2), TorchrunOptions(0, "first"))


def test_a_process_that_torchrun_has_not_started_is_told_so(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match=r"runtime\.cluster: `torchrun` is for processes that torchrun has started"):
        run(settings(tmp_path, "sft", cluster="torchrun"))


@pytest.fixture
def as_rank_0(monkeypatch):
    """This process as the first of two that torchrun has started."""
    names = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2, "TORCHELASTIC_RUN_ID": "none"}
    for name, value in (names | {"MASTER_PORT": 1, "MASTER_ADDR": "host"}).items():
        monkeypatch.setenv(name, str(value))


def test_a_run_that_torchrun_started_refuses_what_its_processes_cannot_be(as_rank_0, tmp_path):
    config = settings(tmp_path, "sft", cluster="auto")
    config["models"]["trainer"] |= {"num_process": 3, "num_gpu": 0}
    message = r"models\.trainer asks for 3 processes with 1 device\(s\), and torchrun started 2"
    with pytest.raises(ValueError, match=message):
        run(config)
    with pytest.raises(ValueError, match="`grpo` samples from a model while another learns"):
        run(settings(tmp_path, "grpo", cluster="auto"))


def test_the_directory_of_the_socket_keeps_others_out(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    own = TorchrunRank(0, 2, 0, 2, "127.0.0.1", 1)
    folder = Path(str(own.driver)).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    with pytest.raises(ValueError, match="belongs to others, or is open to them"):
        _ = own.driver


# ---- with torchrun


def two_processes(tmp_path, algorithm="sft", steps=3, **runtime):
    config = settings(tmp_path, algorithm, steps=steps, cluster="auto", **runtime)
    config["models"]["trainer"] |= {"num_process": 2, "num_gpu": 0}
    return config


def begin(config, *options, **variables):
    path = Path(config["output"]).parent / "run.yaml"
    path.write_text(json.dumps(config))
    command = [sys.executable, "-m", "coalign.cli", "launch", "torchrun", str(path), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables}
    return subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
def test_two_processes_end_with_the_weights_of_two_on_ray(tmp_path, algorithm):
    config = two_processes(tmp_path, algorithm)
    own = config | {"output": str(tmp_path / "torchrun")}
    process = begin(own)
    said = process.communicate()[0]
    assert process.returncode == 0, said
    assert run(config) == 0
    assert [line["step"] for line in metrics(own)] == [line["step"] for line in metrics(config)]
    assert weights_hash(own, 3) == weights_hash(config, 3)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_processes_of_several_machines_meet_at_a_port_with_a_secret(tmp_path):
    """Two torchruns of one process each, which know of each other only what two machines would."""
    config = two_processes(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    where = ["--nodes", "2", "--address", f"127.0.0.1:{port}", "--node-rank"]
    started = [begin(config, *where, str(rank), **{TOKEN: "secret"}) for rank in (0, 1)]
    said = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    together = config | {"output": str(tmp_path / "together")}
    process = begin(together)
    assert process.communicate() and process.returncode == 0
    assert weights_hash(config, 3) == weights_hash(together, 3)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_was_interrupted_goes_on(tmp_path):
    """Ctrl-C reaches all processes: the first saves and ends the others, and the same command goes on."""
    config = two_processes(tmp_path, steps=40, save_every=0)
    own = config | {"output": str(tmp_path / "torchrun")}
    process = begin(own)
    end = time.monotonic() + 200
    while len(metrics(own)) < 3:
        assert process.poll() is None and time.monotonic() < end, process.communicate()[0]
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said = process.communicate()[0]
    assert process.returncode != 0 and metrics(own)[-1]["step"] < 40, said
    process = begin(own)
    said = process.communicate()[0]
    assert process.returncode == 0 and "continuing from" in said, said
    assert [line["step"] for line in metrics(own)] == [*range(41)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_error_of_another_rank_is_named_with_its_rank(tmp_path):
    config = two_processes(tmp_path)
    config["models"]["trainer"]["module"] = "packages.jobs.tests.test_torchrun:FailingTrainer"
    process = begin(config)
    said = process.communicate()[0]
    assert process.returncode != 0 and "failed in trainer, rank 1: RuntimeError: this rank is broken" in said, said


def __getattr__(name):
    """FailingTrainer, which imports transformers: made where it is named."""
    if name != "FailingTrainer":
        raise AttributeError(name)
    from coalign.backends.hf.fsdp import FSDPModule

    class FailingTrainer(FSDPModule):
        def train_step(self, *arguments, **keywords):
            if self.context.rank == 1:
                raise RuntimeError("this rank is broken")
            return super().train_step(*arguments, **keywords)

    return FailingTrainer
