"""A failed run opens on its cause: what `coalign diagnose` says, read once, from files of the run alone."""

import pytest

from coalign.run_files.lock import lock_folder
from coalign_board.readers import cause
from coalign_board.readers.cause import CauseReader
from coalign_board.status import RunSummaries
from packages.board.tests.folders import add_log, add_samples, add_steps, fail, make_run

TRACEBACK = """Traceback (most recent call last):
  File "/opt/lib/python3.11/site-packages/coalign/rewards/calls.py", line 290, in call
    return function(sample)
  File "/home/me/my_rewards.py", line 12, in score
    return len(sample.answer)
AttributeError: 'Sample' object has no attribute 'answer'"""
VERDICT = {"cause": "reward-function", "evidence": []}


@pytest.fixture
def folder(tmp_path):
    return make_run(tmp_path / "run")


@pytest.fixture
def asked(monkeypatch):
    """The folders that a diagnosis was asked for, which takes no process here."""
    folders = []
    monkeypatch.setattr(cause, "_diagnose", lambda folder: folders.append(folder) or dict(VERDICT))
    return folders


def test_the_cause_names_the_persons_own_line(folder):
    fail(folder, TRACEBACK)
    verdict = CauseReader().read(folder, {})
    assert "AttributeError: 'Sample' object has no attribute 'answer'" in verdict["title"]
    assert [each["place"] for each in verdict["evidence"]] == ["log.txt:8", "/home/me/my_rewards.py:12"]
    assert verdict["advice"] and verdict["sure"] in ("certain", "likely", "possible")


def test_a_cause_is_read_once_for_each_state_of_the_log(folder, asked):
    reader = CauseReader()
    assert reader.read(folder, {}) == reader.read(folder, {}) == VERDICT and len(asked) == 1
    fail(folder, TRACEBACK)
    reader.read(folder, {})
    assert len(asked) == 2


def test_a_log_in_which_nothing_failed_has_no_cause(folder):
    add_log(folder, "step 3/3 │ reward 0.5")
    assert CauseReader().read(folder, {})["cause"] is None


def test_a_run_without_a_log_has_no_cause(folder, asked):
    (folder / "log.txt").write_text("")
    assert CauseReader().read(folder, {})["cause"] is None and not asked
    (folder / "log.txt").unlink()
    assert CauseReader().read(folder, {})["cause"] is None and not asked


@pytest.mark.parametrize("name", ["log.txt", "other.log", "stalls/20261124-114500/driver.txt"])
def test_logs_that_lead_out_of_the_folder_are_not_read(folder, asked, tmp_path, name):
    secret = tmp_path / "secret"
    secret.write_text("Traceback: password")
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(secret)
    with pytest.raises(ValueError, match="leads out of the folder"):
        CauseReader().read(folder, {})
    assert not asked


def test_a_diagnosis_that_fails_is_one_sentence(folder, monkeypatch):
    monkeypatch.setattr(cause.sys, "executable", "/bin/false")
    with pytest.raises(ValueError, match="coalign diagnose"):
        CauseReader().read(folder, {})


# ---- pages that have content


def list_pages(folder):
    return RunSummaries().summarise(folder)["pages"]


def test_a_run_that_failed_before_its_first_step_has_few_pages(folder):
    fail(folder, TRACEBACK)
    assert list_pages(folder) == ["cause", "log", "configuration"]
    (folder / "samples.jsonl").write_text("")  # of a run that has no sample yet
    (folder / "checkpoints").mkdir()
    assert list_pages(folder) == ["cause", "log", "configuration"]


def test_a_run_that_goes_will_have_curves(folder):
    with lock_folder(folder):
        assert list_pages(folder) == ["overview", "log", "configuration"]


def test_pages_come_with_their_content(folder):
    add_steps(folder, range(1, 21))
    assert list_pages(folder) == ["overview", "timeline", "log", "configuration"]
    add_steps(folder, range(20, 21), **{"goodput/trained": lambda step: 0.5})
    add_samples(folder, 1)
    (folder / "checkpoints" / "step_2").mkdir(parents=True)
    for name in ("flow.json", "placement.json"):
        (folder / name).write_text("{}")
    everything = "overview rollouts timeline placement checkpoints goodput flow log configuration"
    assert list_pages(folder) == everything.split()
