"""How a run is doing is read from its state.json and the end of its metrics."""

import os

import pytest

from coalign.run_files.lock import lock_folder
from coalign.run_files.state import StateFile
from coalign_board.status import RunSummaries
from packages.board.tests.folders import add_steps, make_run


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


@pytest.mark.parametrize(
    ("status", "reason"),
    [("ended", None), ("ended", "SIGINT"), ("failed", "ValueError: the reward of group 3 is a list")],
)
def test_a_run_says_how_it_ended(folder, status, reason):
    add_steps(folder, range(1, 4))
    StateFile(folder).note(status, step=3, steps=20, reason=reason)
    assert (summarise(folder)["status"], summarise(folder)["why"]) == (status, reason)
    with lock_folder(folder):  # continued
        assert (summarise(folder)["status"], summarise(folder)["why"]) == ("running", None)


def test_a_stall_counts_until_the_next_step(folder):
    with lock_folder(folder):
        StateFile(folder).note("stalled", reason="policy.generate without an answer for 900 s")
        expected = ("stalled", "policy.generate without an answer for 900 s")
        assert (summarise(folder)["status"], summarise(folder)["why"]) == expected
        add_steps(folder, [4])
        assert summarise(folder)["status"] == "running"


def test_what_is_no_file_of_the_run_is_left_out(folder, tmp_path):
    (tmp_path / "secret").write_text('{"step": 1, "reward/mean": 42}\n')
    (folder / "metrics.jsonl").symlink_to(tmp_path / "secret")
    assert summarise(folder)["numbers"] == {}
