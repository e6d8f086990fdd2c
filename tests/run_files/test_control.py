"""Requests to a run, and the lock that says whether there is one. tests/engine/hooks/test_control.py has runs."""

import json
import os
import socket
from multiprocessing import get_context

import pytest

from coalign.engine.hooks.run_folder import RunFolder
from coalign.run_files.control import (
    ControlRequest,
    ControlResult,
    read_answer,
    read_request,
    submit,
    wait_for_answer,
    write_answer,
)
from coalign.run_files.lock import FolderInUse, is_going, lock_folder, read_owner


@pytest.fixture
def run(tmp_path):
    """The folder of a run that is going."""
    (tmp_path / "config.yaml").write_text("")
    with lock_folder(tmp_path):
        yield tmp_path


def list_names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_lock_says_whose_it_is_and_whether_it_is_held(tmp_path):
    assert not is_going(tmp_path) and read_owner(tmp_path) is None and not list_names(tmp_path)
    for _ in range(2):
        with lock_folder(tmp_path):
            assert is_going(tmp_path)
            with get_context("fork").Pool(1) as other:
                assert other.apply(is_going, (tmp_path,))
            owner = read_owner(tmp_path)
            assert owner and (owner.pid, owner.host) == (os.getpid(), socket.gethostname())
        assert not is_going(tmp_path) and read_owner(tmp_path) == owner


def test_who_looks_at_a_lock_keeps_nobody_out(tmp_path):
    lock_folder(tmp_path).close()
    with open(tmp_path / ".lock", "rb") as looking:
        import fcntl
        import threading

        fcntl.flock(looking, fcntl.LOCK_SH)
        threading.Timer(0.05, fcntl.flock, (looking, fcntl.LOCK_UN)).start()
        with lock_folder(tmp_path), pytest.raises(FolderInUse):
            lock_folder(tmp_path)


def test_a_request_is_answered_and_gone(run):
    request_id = submit(run, ControlRequest("save"), ControlRequest("scale", {"policy": 2}))
    pending = read_request(run)
    assert pending and pending.id == request_id
    assert list(pending.requests) == [{"do": "save"}, {"do": "scale", "models": {"policy": 2}}]
    assert read_answer(run, request_id) is None
    results = [ControlResult("save", True, "step 3 is in step_3"), ControlResult("scale", False, "refused")]
    write_answer(run, request_id, results)
    assert wait_for_answer(run, request_id) == results and read_request(run) is None
    assert list_names(run) == [".lock", "config.yaml", "control.done.json"]


def test_earlier_answers_are_kept_for_those_who_ask_late(run):
    first = submit(run, ControlRequest("save"))
    write_answer(run, first, [ControlResult("save", True, "first")])
    second = submit(run, ControlRequest("save"))
    write_answer(run, second, [ControlResult("save", True, "second")])
    assert [wait_for_answer(run, each)[0].text for each in (first, second)] == ["first", "second"]


def test_there_is_one_request_at_a_time(run):
    submit(run, ControlRequest("save"))
    before = (run / "control.json").read_text()
    with pytest.raises(ValueError, match="has another request to answer"):
        submit(run, ControlRequest("stop"))
    assert (run / "control.json").read_text() == before and len(list_names(run)) == 3


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"do": "sav"}, "cannot be asked to 'sav'; it can save, stop, scale; did you mean 'save'?"),
        ({"do": 7}, "cannot be asked to '7'"),
        ({}, "cannot be asked to ''"),
        ("save", "'save' is no request"),
        ({"do": "stop", "model": "policy"}, "a request has no 'model'"),
        ({"do": "scale"}, "`scale` names models"),
        ({"do": "scale", "models": {"policy": 0}}, "policy is 0; expected a number of processes"),
        ({"do": "scale", "models": ["policy"]}, "is no request"),
    ],
)
def test_what_is_no_request_is_refused(content, problem):
    with pytest.raises(ValueError) as caught:
        ControlRequest.parse(content)
    assert problem in str(caught.value)


def test_without_a_run_there_is_no_request(tmp_path):
    for _ in range(2):
        with pytest.raises(ValueError, match="no run is going in"):
            submit(tmp_path, ControlRequest("save"))
        lock_folder(tmp_path).close()
        (tmp_path / "config.yaml").write_text("")
    assert list_names(tmp_path) == [".lock", "config.yaml"]


def test_a_run_that_starts_or_ends_refuses_what_it_finds(tmp_path):
    (tmp_path / "config.yaml").write_text("")
    folder = RunFolder(tmp_path)
    late = submit(tmp_path, ControlRequest("stop"))
    folder.close()
    assert wait_for_answer(tmp_path, late) == [ControlResult("stop", False, "the run has ended")]
    # A run that is killed leaves the request of that moment.
    (tmp_path / "control.json").write_text(json.dumps({"id": "left", "requests": [{"do": "stop"}]}))
    with pytest.raises(ValueError, match="has ended, and has not answered"):
        wait_for_answer(tmp_path, "left")
    folder = RunFolder(tmp_path)
    assert wait_for_answer(tmp_path, "left") == [ControlResult("stop", False, "the run ended before it came to this")]
    assert read_request(tmp_path) is None
    folder.close()


@pytest.mark.parametrize("content", [b"", b"[]", b'{"id"', b"\xff", b"[" * 100_000])
def test_a_damaged_file_is_one_request_with_a_problem(run, content):
    (run / "control.json").write_bytes(content)
    pending = read_request(run)
    assert pending and len(pending.requests) == 1
    (run / "control.done.json").write_bytes(content)
    write_answer(run, pending.id, [ControlResult("", False, "refused")])
    assert read_answer(run, "") == [ControlResult("", False, "refused")]
