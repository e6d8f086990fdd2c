"""Whole runs in processes of their own: killed, interrupted, on Ray."""

import os
import signal
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from coalign.engine.hooks.recorder import MetricsRecorder
from coalign.engine.hooks.run_control import StopSignals
from tests.runs import MARK, command, metrics, processes_of, run, settings, wait_for, weights_hash


def wait_for_step(process, config, step, seconds=90):
    wait_for(lambda: any(line["step"] >= step for line in metrics(config)), process, seconds)


def finish(process, code=0):
    output, _ = process.communicate(timeout=150)
    assert process.returncode == code, output
    return output


@pytest.mark.parametrize(
    ("moments", "steps"),
    [pytest.param((2,), 4, id="once"), pytest.param((1, 2, 3, 4, 5), 6, id="at every step", marks=pytest.mark.slow)],
)
def test_killed_and_started_again_the_weights_are_the_same(tmp_path, moments, steps):
    config = settings(tmp_path, "grpo", steps=steps, save_every=1, eval_at_start=False)
    config["data"].pop("eval")
    run(config)
    killed = config | {"output": str(tmp_path / "killed")}
    for step in moments:
        process = command(killed)
        wait_for_step(process, killed, step)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert run(killed) == 0
    assert weights_hash(killed, steps) == weights_hash(config, steps)
    assert [line["step"] for line in metrics(killed)] == list(range(1, steps + 1))


@pytest.mark.parametrize("times", [1, 2])  # `timeout` sends its signal to a process, and then to its group
def test_ctrl_c_ends_a_run_after_its_step_with_a_checkpoint(tmp_path, monkeypatch, times):
    config = settings(tmp_path, "sft", eval_at_start=False)
    record = MetricsRecorder.after_step

    def after_step(self, engine, stats, batch):
        record(self, engine, stats, batch)
        for _ in range(times if engine.step == 2 else 0):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(MetricsRecorder, "after_step", after_step)
    assert run(config) == 130
    folder = Path(config["output"])
    assert "SIGINT: finishing this step, then saving" in (folder / "log.txt").read_text()
    assert [line["step"] for line in metrics(config)] in ([1, 2], [1, 2, 3])
    assert (folder / "checkpoints" / f"step_{metrics(config)[-1]['step']}" / "manifest.json").exists()


def test_a_second_ctrl_c_stops_a_run_at_once(monkeypatch):
    clock = iter([10.0, 10.1, 11.0])
    monkeypatch.setattr("coalign.engine.hooks.run_control.time", Mock(monotonic=lambda: next(clock)))
    with StopSignals(None) as signals:
        signals.engine = Mock()
        for _ in range(2):  # 0.1 s after the first one
            signal.raise_signal(signal.SIGINT)
        signals.engine.progress.request_stop.assert_called_once_with("SIGINT")
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


pytest.importorskip("ray")


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("algorithm", "workers"),
    [
        pytest.param("grpo", 1, id="one rollout worker", marks=pytest.mark.backends),
        pytest.param("grpo", 2, id="two rollout workers", marks=pytest.mark.slow),
        pytest.param("ppo", 2, id="ppo", marks=pytest.mark.slow),
    ],
)
def test_ray_gives_the_weights_of_one_process(tmp_path, monkeypatch, algorithm, workers):
    config = settings(tmp_path, algorithm, eval_at_start=False)
    config["data"].pop("eval")
    run(config)
    there = config | {"output": str(tmp_path / "ray")}
    placed = [f"models.policy.num_process={workers}", "models.trainer.num_process=1"]
    monkeypatch.setenv(MARK, there["output"])  # of what Ray starts; this process, the driver, is the only one not new
    assert run(there, "runtime.cluster=ray", *placed) == 0
    assert weights_hash(there, 4) == weights_hash(config, 4)
    for key in ("reward/mean", "loss/value", "loss/grad_norm", "tokens/response"):
        assert [line[key] for line in metrics(there)] == [line[key] for line in metrics(config)]
    end = time.monotonic() + 20
    while processes_of(there) and time.monotonic() < end:
        time.sleep(0.2)
    assert not processes_of(there), "processes were left behind"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_worker_that_stands_still_ends_the_run_in_time(tmp_path):
    """A stopped process answers nothing; `runtime.call_timeout` ends the run, with the stacks of the others."""
    options = {"call_timeout": 20, "stall": 5, "max_staleness": 1, "restarts": 0}
    config = settings(tmp_path, "grpo", steps=500, eval_at_start=False, cluster="ray", **options)
    process = command(config)
    wait_for_step(process, config, 2, seconds=150)
    stopped = next(p for p in processes_of(config) if any(":policy:" in part for part in p.cmdline()))
    stopped.suspend()
    output, _ = process.communicate(timeout=120)
    assert process.returncode not in (0, None)
    assert "no answer within 20 s" in output and "saved up to step" in output
    assert "the report of a stalled run failed" not in output
    assert list((Path(config["output"]) / "stalls").glob("*/report.txt"))
    assert not processes_of(config), "processes were left behind"
