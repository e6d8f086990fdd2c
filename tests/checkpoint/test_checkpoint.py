import errno
import logging
import threading
import time
from types import SimpleNamespace

import pytest

from coalign.backends.base import TrainableModule
from coalign.checkpoint import folder
from coalign.checkpoint.folder import CheckpointFolder
from coalign.checkpoint.manifest import MANIFEST, CorruptCheckpoint, verify_checkpoint
from coalign.checkpoint.resume import find_newest
from coalign.checkpoint.schedule import Save
from coalign.files import report_written
from tests.runs import metrics, run, settings, stopping_after, weights_hash


def fill(directory):
    (directory / "hf").mkdir()
    (directory / "hf" / "model.bin").write_bytes(bytes(range(256)) * 40)
    (directory / "state.json").write_text('{"step": 1}')
    return SimpleNamespace(paths=[], finish=lambda: None)


@pytest.fixture
def checkpoints(tmp_path):
    return CheckpointFolder(tmp_path / "checkpoints", keep=2)


def flip(file):
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])


@pytest.mark.parametrize(
    ("file", "damage", "said"),
    [
        ("state.json", flip, "contents of state.json have changed"),
        ("hf/model.bin", flip, "contents of hf/model.bin have changed"),
        ("hf/model.bin", lambda file: file.write_bytes(b"1"), "model.bin has 1 bytes, 10240 were written"),
        ("hf/model.bin", lambda file: file.unlink(), "model.bin is missing"),
        (MANIFEST, lambda file: file.write_text("{"), r"no readable manifest\.json"),
    ],
)
def test_damage_is_found_and_the_checkpoint_before_is_used(checkpoints, caplog, file, damage, said):
    first, second = checkpoints.write(1, fill), checkpoints.write(2, fill)
    damage(second / file)
    with pytest.raises(CorruptCheckpoint, match=said):
        verify_checkpoint(second)
    assert find_newest([checkpoints]) == first and file in caplog.text


def test_a_full_disk_leaves_the_last_good_one_and_nothing_else(checkpoints):
    good = checkpoints.write(1, fill)

    def full(directory):
        fill(directory)
        raise OSError(errno.ENOSPC, "No space left on device")

    for step in (1, 2):
        with pytest.raises(OSError, match="No space"):
            checkpoints.write(step, full)
    assert find_newest([checkpoints]) == good
    assert [p.name for p in checkpoints.directory.iterdir()] == ["step_1"]


def test_a_crash_while_writing_is_invisible_and_cleaned_up(checkpoints):
    good = checkpoints.write(1, fill)
    left = checkpoints.directory / ".writing-step_2"
    left.mkdir()
    (left / "state.json").write_text("{}")
    assert find_newest([checkpoints]) == good
    checkpoints.write(2, fill)
    assert not left.exists()


class Files:
    """Files of a checkpoint that someone else writes, once ``write`` or ``fail`` is called."""

    def __init__(self):
        self.paths, self.finished = [], 0

    def begin(self, directory):
        fill(directory)
        self.paths = [directory / "model"]
        return self

    def write(self):
        self.paths[0].mkdir()
        (self.paths[0] / "weights").write_text("1 2 3")
        report_written(self.paths[0])

    def fail(self):
        report_written(self.paths[0], "OSError: no space")

    def finish(self):
        self.finished += 1


def wait_until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_checkpoint_under_way_cannot_be_seen_and_is_complete_once_all_files_are(checkpoints):
    first, files, heard = checkpoints.write(1, fill), Files(), []
    checkpoints.on_complete = heard.append
    checkpoints.begin(2, files.begin)
    time.sleep(0.2)
    checkpoints.poll()
    assert checkpoints.steps() == [1] and find_newest([checkpoints]) == first and heard == []
    files.write()
    wait_until(lambda: checkpoints.poll() or heard)
    assert find_newest([checkpoints]) == checkpoints.path(2) and heard == [2] and files.finished == 0
    left = {str(path.relative_to(checkpoints.path(2))) for path in checkpoints.path(2).rglob("*") if path.is_file()}
    assert left == {MANIFEST, "state.json", "hf/model.bin", "model/weights"}
    assert not list(checkpoints.directory.glob(".writing*"))


def test_what_a_writer_reports_is_raised_and_nothing_is_left(checkpoints):
    checkpoints.write(1, fill)
    files = Files()
    checkpoints.begin(2, files.begin)
    checkpoints.poll()
    files.fail()
    with pytest.raises(OSError, match="no space"):
        wait_until(checkpoints.poll)
    assert files.finished  # nobody writes into it any more
    assert [path.name for path in checkpoints.directory.iterdir()] == ["step_1"]
    checkpoints.finish()  # it is told once
    checkpoints.write(2, fill)
    assert checkpoints.steps() == [1, 2]


def test_a_report_between_two_looks_counts(checkpoints, monkeypatch):
    files, look = Files(), folder.read_report

    def look_and_fail(path):
        found = look(path)
        if found is None:
            files.fail()
        return found

    monkeypatch.setattr(folder, "read_report", look_and_fail)
    checkpoints.begin(1, files.begin)
    with pytest.raises(OSError, match="no space"):
        checkpoints.finish()
    assert checkpoints.steps() == []


def test_a_writer_that_is_gone_does_not_hold_up_the_run(checkpoints):
    class Gone(Files):
        def finish(self):
            raise RuntimeError("the worker is gone")

    checkpoints.begin(1, Gone().begin)
    with pytest.raises(RuntimeError, match="the worker is gone"):
        checkpoints.finish()
    assert list(checkpoints.directory.iterdir()) == []


def test_a_checkpoint_that_is_abandoned_disappears(checkpoints):
    checkpoints.begin(1, Files().begin)
    checkpoints.abandon()
    wait_until(lambda: not list(checkpoints.directory.iterdir()))


def test_a_checkpoint_is_read_back_before_it_counts(checkpoints, monkeypatch):
    def damage(path):
        if path.name == "model.bin":
            path.write_bytes(path.read_bytes()[:-1] + b"x")

    monkeypatch.setattr(folder, "_drop_from_memory", damage)
    with pytest.raises(CorruptCheckpoint, match=r"contents of hf/model\.bin have changed"):
        checkpoints.write(1, fill)
    assert list(checkpoints.directory.iterdir()) == []


def test_the_newest_and_the_best_are_kept(checkpoints):
    for step in range(1, 6):
        checkpoints.write(step, fill)
        checkpoints.prune(best=2 if step >= 2 else None)
    assert checkpoints.steps() == [2, 4, 5]


# ---- in a run


@pytest.fixture
def slow_writer(monkeypatch):
    """The writer of a worker waits until step 3 is recorded; returns the steps at which checkpoints were complete."""
    from coalign.backends.trainer_state import BackgroundWriter
    from coalign.engine.hooks.recorder import MetricsRecorder

    gate, write, record, tidy = threading.Event(), BackgroundWriter._write, MetricsRecorder.write, Save._tidy
    now, complete = [0], {}

    def wait(self, *arguments):
        assert gate.wait(60)
        write(self, *arguments)

    def recorded(self, step, stats):
        record(self, step, stats)
        now[0] = step
        if step >= 3:
            gate.set()

    def tidied(self, step):
        tidy(self, step)
        complete[step] = now[0]

    monkeypatch.setattr(BackgroundWriter, "_write", wait)
    monkeypatch.setattr(MetricsRecorder, "write", recorded)
    monkeypatch.setattr(Save, "_tidy", tidied)
    return complete


def test_steps_go_on_while_a_checkpoint_is_written_and_the_next_one_waits(tmp_path, slow_writer):
    config = settings(tmp_path, "sft", steps=5, save_every=1, eval_at_start=False) | {"output": str(tmp_path / "plain")}
    config["runtime"] |= {"keep": 9, "save_every": 2}
    assert run(config) == 0
    assert slow_writer[2] in (3, 4) and slow_writer.keys() == {2, 4, 5}
    left = sorted(path.name for path in (tmp_path / "plain" / "checkpoints").iterdir())
    assert left == ["step_2", "step_4", "step_5"]
    resumed = config | {"output": str(tmp_path / "resumed")}
    resumed["runtime"] = config["runtime"] | {"resume": str(tmp_path / "plain" / "checkpoints" / "step_2")}
    assert run(resumed) == 0
    # step 2 was written after step 3 had changed the weights
    assert weights_hash(resumed, 5) == weights_hash(config, 5)


def test_an_error_and_a_stop_wait_for_the_checkpoint_under_way(tmp_path, slow_writer, monkeypatch):
    config = settings(tmp_path, "sft", steps=9, save_every=2, eval_at_start=False)
    with stopping_after(3):
        assert run(config) == 0
    assert slow_writer == {2: 3, 3: 3}
    train_step = TrainableModule.train_step

    def fail(self, *arguments, **keywords):
        if self.version == 4:
            raise RuntimeError("half an update")
        return train_step(self, *arguments, **keywords)

    monkeypatch.setattr(TrainableModule, "train_step", fail)
    with pytest.raises(RuntimeError, match="half an update") as caught:
        run(config)
    assert caught.value.__notes__ == ["saved up to step 4: the same command continues there"]
    assert not (tmp_path / "run" / "checkpoints" / "step_5").exists()


def test_a_disk_that_is_full_while_a_worker_writes_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    from torch.distributed.checkpoint import state_dict_saver

    save, calls = state_dict_saver.save, []

    def full(*arguments, **keywords):
        calls.append(1)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(*arguments, **keywords)

    monkeypatch.setattr(state_dict_saver, "save", full)
    config = settings(tmp_path, "sft", steps=6, save_every=2, eval_at_start=False, keep=9)
    with caplog.at_level(logging.WARNING):
        assert run(config) == 0
    assert (
        "the checkpoint of step 4 could not be written" in caplog.text and "the last good one is step 2" in caplog.text
    )
    assert sum(line.get("checkpoint/failed", 0) for line in metrics(config)) <= 1
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["step_2", "step_6"]


def test_a_stop_that_comes_after_a_steps_turn_to_be_saved_still_saves_it(tmp_path, monkeypatch):
    config = settings(tmp_path, "sft", steps=3, eval_at_start=False)
    after_step = Save.after_step

    def interrupt(self, engine, stats, batch):
        after_step(self, engine, stats, batch)
        engine.progress.request_stop("SIGINT")  # between two steps

    monkeypatch.setattr(Save, "after_step", interrupt)
    run(config)
    verify_checkpoint(tmp_path / "run" / "checkpoints" / "step_1")
    assert len(metrics(config)) == 1
