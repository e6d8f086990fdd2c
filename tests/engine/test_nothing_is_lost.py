"""Errors, signals and damaged files: what a run keeps, and what it says about the rest."""

import errno
import json
import os
import signal
from pathlib import Path

import pytest

from coalign.files import RecordFile, Sink
from tests.runs import command, metrics, run, run_to_end, settings, wait_for, weights_hash


def folder_of(config):
    return Path(config["output"])


def checkpoints_of(config):
    return sorted(path.name for path in (folder_of(config) / "checkpoints").glob("step_*"))


@pytest.mark.parametrize("staleness", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_after_an_error_the_last_step_is_saved_and_the_same_command_goes_on(tmp_path, staleness):
    config = settings(tmp_path, "grpo", eval_at_start=False, max_staleness=staleness)
    broken = tmp_path / "broken"
    broken.touch()
    config["reward"] = {"fn": "tests.functions:refuses_some", "broken": str(broken), "retries": 0}
    with pytest.raises(RuntimeError, match="the service is gone") as caught:
        run(config)
    [saved] = checkpoints_of(config)
    assert caught.value.__notes__ == [f"saved up to step {saved[5:]}: the same command continues there"]
    if staleness == 0:
        assert saved == "step_2"
    broken.unlink()
    assert [line["step"] for line in run_to_end(config)] == [1, 2, 3, 4]
    if staleness == 0:  # a stale run goes on with samples of newer weights
        whole = config | {"output": str(tmp_path / "whole")}
        run(whole)
        assert weights_hash(whole, 4) == weights_hash(config, 4)


def test_a_checkpoint_comes_by_the_clock(tmp_path):
    config = settings(tmp_path, "sft", eval_at_start=False, save_minutes=1e-6)
    config["runtime"]["keep"] = 4
    run(config)
    assert checkpoints_of(config) == ["step_1", "step_2", "step_3", "step_4"]


def test_only_damaged_checkpoints_refuse_the_run_and_nothing_is_written_over(tmp_path):
    config = settings(tmp_path, "sft", eval_at_start=False, save_every=2)
    run(config)
    for path in (folder_of(config) / "checkpoints").glob("step_*/state.json"):
        path.write_text("{}")
    before = (folder_of(config) / "metrics.jsonl").read_bytes()
    with pytest.raises(OSError, match=r"no checkpoint in .* is intact .*step_4.*step_2.*`runtime.resume=never`"):
        run(config)
    assert (folder_of(config) / "metrics.jsonl").read_bytes() == before
    run(config, "runtime.resume=never")
    assert (folder_of(config) / "metrics.jsonl.before-1").read_bytes() == before
    assert (folder_of(config) / "checkpoints.before-1" / "step_4").exists()
    assert (folder_of(config) / "model").resolve() == (folder_of(config) / "checkpoints" / "step_4" / "hf").resolve()


def test_a_run_without_a_checkpoint_begins_anew_beside_the_old_records(tmp_path):
    config = settings(tmp_path, "sft", eval_at_start=False)
    folder_of(config).mkdir()
    (folder_of(config) / "metrics.jsonl").write_text('{"step": 1, "kept": true}\n')
    run(config)
    assert (folder_of(config) / "metrics.jsonl.before-1").read_text() == '{"step": 1, "kept": true}\n'
    assert len(metrics(config)) == 4


def test_going_on_from_an_older_checkpoint_moves_the_later_ones_aside(tmp_path):
    config = settings(tmp_path, "sft", eval_at_start=False, save_every=1)
    config["runtime"]["keep"] = 4
    run(config)
    hashed = weights_hash(config, 4)
    run(config, f"runtime.resume={folder_of(config) / 'checkpoints' / 'step_2'}")
    assert {"step_3.before-1", "step_4.before-1", "step_3", "step_4"} <= set(checkpoints_of(config))
    assert weights_hash(config, 4) == hashed
    cut = [json.loads(line)["step"] for line in (folder_of(config) / "metrics.jsonl.cut").read_bytes().splitlines()]
    assert cut == [3, 4]


# ---- files that cannot be written ----------------------------------------------------------------------------------


def test_records_wait_until_the_disk_is_back(tmp_path, caplog):
    file = RecordFile(tmp_path / "away" / "records")
    for number in range(3):
        file.append(b"%d\n" % number)
    assert caplog.text.count("cannot be written") == 1
    file.path.parent.mkdir()
    file.append(b"3\n")
    assert file.path.read_bytes() == b"0\n1\n2\n3\n"
    assert caplog.text.count("can be written again") == 1


def test_a_sink_survives_the_errors_it_names_alone():
    sink = Sink("it")
    with sink.survive():
        raise OSError(errno.EIO, "away")
    assert sink.failed
    with pytest.raises(ValueError), sink.survive():
        raise ValueError


def test_a_run_outlasts_a_folder_that_cannot_be_written(tmp_path, monkeypatch, caplog):
    """For one step, metrics, samples, TensorBoard, log and timelines go nowhere; then they catch up."""
    from coalign.engine.hooks.recorder import MetricsRecorder

    config = settings(tmp_path, "grpo", eval_at_start=False, trackers=["tensorboard"], timeline_every=1)
    real_open, write = open, MetricsRecorder.after_step

    def no_space(path, mode="r", *rest, **keywords):
        if "a" in mode and str(path).startswith(config["output"]):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real_open(path, mode, *rest, **keywords)

    def after_step(self, engine, stats, batch):
        monkeypatch.setattr("builtins.open", no_space if engine.step == 2 else real_open)
        write(self, engine, stats, batch)

    monkeypatch.setattr(MetricsRecorder, "after_step", after_step)
    assert [line["step"] for line in run_to_end(config)] == [1, 2, 3, 4]
    assert (folder_of(config) / "log.txt").read_text().count("metrics.jsonl cannot be written") == 1
    assert "metrics.jsonl can be written again" in (folder_of(config) / "log.txt").read_text()
    assert "Logging error" not in caplog.text
    [events] = (folder_of(config) / "tensorboard").iterdir()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curves = EventAccumulator(str(events))
    curves.Reload()
    expected = [(line["step"], pytest.approx(line["loss/value"])) for line in metrics(config)]
    assert [(point.step, point.value) for point in curves.Scalars("loss/value")] == expected


# ---- signals -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_closed_terminal_saves(tmp_path, number):
    config = settings(tmp_path, "sft", steps=100_000, eval_at_start=False)
    process = command(config)
    wait_for(lambda: len(metrics(config)) >= 2, process)
    process.stdout.close()  # the terminal is gone
    process.send_signal(number)
    assert process.wait(timeout=60) == 128 + number
    assert checkpoints_of(config) == [f"step_{metrics(config)[-1]['step']}"]


@pytest.mark.slow
def test_ctrl_c_while_loading_leaves_one_line(tmp_path):
    config = settings(tmp_path, "sft", steps=100_000, eval_at_start=False)
    process = command(config)
    wait_for(lambda: folder_of(config).exists(), process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "SIGINT: stopped at once" in output or "finishing this step" in output
    assert "Traceback" not in output
