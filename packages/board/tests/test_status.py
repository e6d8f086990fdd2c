"""How a run is doing is read from the ends of its files."""

import os

import pytest

from coalign.run_files.lock import lock_folder
from coalign_board.status import RunSummaries
from packages.board.tests.folders import add_log, add_steps, make_run

TRACEBACK = """ERROR coalign.launch.run: the run ended with an error
Traceback (most recent call last):
  File "run.py", line 3, in train
    raise ValueError("no")
ValueError: the reward of group 3 is a list
  note: look there"""


@pytest.fixture
def folder(tmp_path):
    return make_run(tmp_path / "run")


def summarise(folder):
    return RunSummaries().summarise(folder)


def test_a_run_whose_lock_is_held_is_running(folder):
    with lock_folder(folder):
        before = summarise(folder)
        assert (before["status"], before["step"], before["pid"]) == ("running", None, os.getpid())
        add_steps(folder, range(1, 4))
        after = summarise(folder)
        assert (after["step"], after["last"], after["algorithm"]) == (3, 20, "grpo")
        assert after["numbers"] == {"loss/value": 0.25, "reward/mean": 0.03} and after["seconds"] == 6.0
        assert after["line"].startswith("reward 0.030 │ loss 0.250")
        assert after["growth"] != before["growth"]
    assert summarise(folder)["status"] == "failed"  # killed: it says nothing


def test_a_run_that_came_to_its_last_step_has_ended(folder):
    add_steps(folder, range(1, 21))
    assert (summarise(folder)["status"], summarise(folder)["why"]) == ("ended", None)


def test_a_run_that_was_stopped_has_ended(folder):
    add_steps(folder, range(1, 4))
    add_log(folder, "WARNING coalign.launch.run: SIGINT: finishing this step, then saving; once more to stop at once")
    assert (summarise(folder)["status"], summarise(folder)["why"]) == ("ended", "SIGINT")


def test_a_run_that_stopped_early_has_ended(folder):
    add_steps(folder, range(1, 4))
    add_log(folder, "INFO coalign.report.display: goodput: 35% of 0:02:35 went into tokens that were trained on")
    assert summarise(folder)["status"] == "ended"


def test_an_error_is_named(folder):
    add_steps(folder, range(1, 4))
    add_log(folder, TRACEBACK)
    found = summarise(folder)
    assert (found["status"], found["why"]) == ("failed", "ValueError: the reward of group 3 is a list")
    with lock_folder(folder):  # continued
        add_steps(folder, [4])
        assert summarise(folder)["status"] == "running"


def test_guards_that_end_a_run_are_named(folder):
    add_steps(folder, range(1, 4))
    add_log(folder, "ERROR coalign.engine.hooks.guards: stopping: loss/approx_kl is 3 at step 3")
    add_log(folder, "INFO coalign.report.display: goodput: 35% of 0:02:35 went into tokens that were trained on")
    assert (summarise(folder)["status"], summarise(folder)["why"]) == ("failed", "loss/approx_kl is 3 at step 3")


def test_a_stall_counts_until_the_next_step(folder):
    add_steps(folder, range(1, 4))
    report = folder / "stalls" / "20261124-114500" / "report.txt"
    report.parent.mkdir(parents=True)
    report.write_text("policy.generate without an answer for 900 s; phase `rollout` since 11:30\nmore\n")
    os.utime(folder / "metrics.jsonl", ns=(1, 1))
    with lock_folder(folder):
        found = summarise(folder)
        assert found["status"] == "stalled" and found["why"].startswith("policy.generate without an answer")
        add_steps(folder, [4])
        os.utime(report, ns=(1, 1))
        assert summarise(folder)["status"] == "running"


def test_what_is_no_file_of_the_run_is_left_out(folder, tmp_path):
    (tmp_path / "secret").write_text('{"step": 1, "reward/mean": 42}\n')
    (folder / "metrics.jsonl").symlink_to(tmp_path / "secret")
    assert summarise(folder)["numbers"] == {}
