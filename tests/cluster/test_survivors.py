"""What outlives a driver: the record of its processes, and the processes themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coalign.cluster.placement.nodes import ProcessPlacement
from coalign.cluster.survivors.claim import NAME, LoadedSources, ProcessState, RunClaim, WorkersRecord, read_workers
from tests.runs import MARK, ROOT, processes_of

PLACES = {"policy": [ProcessPlacement(0, ("0", "1"))], "reward": [ProcessPlacement(0)]}


def test_the_record_is_read_as_it_was_written_but_not_in_a_copy_of_the_folder(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    assert read_workers(folder) is None
    record = WorkersRecord("run-1", str(folder), 3, "same", ["node"], PLACES)
    record.write()
    assert read_workers(folder) == record
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / NAME).write_bytes((folder / NAME).read_bytes())
    assert read_workers(copy) is None
    (folder / NAME).write_bytes((folder / NAME).read_bytes()[:-20])
    assert read_workers(folder) is None


def test_a_changed_source_file_is_found(tmp_path, monkeypatch):
    file = tmp_path / "loaded_by_a_test.py"
    file.write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    sources = LoadedSources()
    __import__("loaded_by_a_test")
    sources.note()
    assert sources.find_changed() is None
    file.write_text("x = 20\n")
    assert sources.find_changed() == str(file)
    del sys.modules["loaded_by_a_test"]


ray = pytest.importorskip("ray")


class Answers:
    """Stands where the processes are asked; each look gives the next state of each process, the last one again."""

    def __init__(self, monkeypatch, states: dict[str, list[ProcessState]]) -> None:
        self.states = states
        monkeypatch.setattr("coalign.cluster.survivors.takeover._ask", self.ask)
        monkeypatch.setattr("coalign.cluster.survivors.takeover.TORN_SECONDS", 0.0)

    def ask(self, actors, method, *arguments):
        found = {name: self.states[name][0] for name in actors if self.states[name]}
        self.states = {name: own[1:] or own for name, own in self.states.items()}
        return found


def state(calls: int = 5, busy: bool = False, failed: bool = False, changed: str | None = None) -> ProcessState:
    return ProcessState(1, 0.5, calls, busy, failed, changed)


RANKS = {"trainer": [ProcessPlacement(0), ProcessPlacement(0)]}


@pytest.mark.parametrize(
    ("states", "fit"),
    [
        ({"p:replica0": [state()], "p:replica1": [state(4)]}, ["p:replica0", "p:replica1"]),
        ({"p:replica0": [state(failed=True)], "p:replica1": [state()]}, ["p:replica1"]),
        ({"p:replica0": [state(changed="f.py")], "p:replica1": []}, []),
        ({"p:replica0": [state(busy=True), state()]}, ["p:replica0"]),
        ({"trainer:rank0": [state()], "trainer:rank1": [state()]}, ["trainer:rank0", "trainer:rank1"]),
        ({"trainer:rank0": [state()], "trainer:rank1": [state(4)]}, []),  # a call has reached one alone
        ({"trainer:rank0": [state()]}, []),  # the other is gone
        ({"trainer:rank0": [state()], "trainer:rank1": [state(busy=True)]}, []),  # it waits for rank 0, for ever
        ({"trainer:rank0": [state(failed=True)], "trainer:rank1": [state()], "p:replica0": [state()]}, ["p:replica0"]),
    ],
)
def test_processes_that_fit_are_chosen(monkeypatch, states, fit):
    from coalign.cluster.survivors.takeover import _choose

    named = {f"run-1:{name}": own for name, own in states.items()}
    Answers(monkeypatch, named)
    record = WorkersRecord("run-1", "/run", 1, "same", [], RANKS)
    assert sorted(_choose(dict.fromkeys(named), record)) == [f"run-1:{name}" for name in fit]


def test_a_driver_that_still_goes_is_not_robbed(monkeypatch):
    from coalign.cluster.survivors import takeover

    monkeypatch.setattr(takeover.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(takeover, "LEASE_SECONDS", 20.0)
    lives = [ProcessState(1, silence, 5, False, False) for silence in (4.0, 5.0, 0.0)]
    Answers(monkeypatch, {"run-1:p:replica0": lives})
    clock = iter([100.0, 100.0, 101.0, 102.0])
    monkeypatch.setattr(takeover.time, "monotonic", lambda: next(clock))
    actors = {"run-1:p:replica0": None}
    with pytest.raises(ValueError, match="is led by another driver, which its processes heard 0 s ago"):
        takeover._refuse_if_led(RunClaim(Path("run"), 2, "same", waits=True), actors, takeover._ask(actors, "peek"))
    with pytest.raises(ValueError, match="its processes obey driver 1 of the run, and this is 1"):
        takeover._refuse_if_led(RunClaim(Path("run"), 1, "same"), actors, {"run-1:p:replica0": lives[0]})


# ---- with drivers in processes of their own


def drive(folder: Path, epoch: int, what: str, **how: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.cluster.claimant", str(folder), str(epoch), what, json.dumps(how)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", MARK: str(folder), "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def read_pids(shown: str) -> dict[str, list[int]]:
    return json.loads(next(line for line in reversed(shown.splitlines()) if line.startswith("{")))["pids"]


def wait_until_none_is_left(folder: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    while left := processes_of({"output": str(folder)}):
        assert time.monotonic() < end, [process.cmdline() for process in left]
        time.sleep(0.2)


@pytest.fixture
def folder(tmp_path):
    yield tmp_path
    for left in processes_of({"output": str(tmp_path)}):
        left.kill()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_next_driver_takes_the_processes_over(folder):
    first = drive(folder, 1, "fail")
    before = read_pids(first.communicate(timeout=400)[0])
    second = drive(folder, 2, "kill")
    shown = second.communicate(timeout=400)[0]
    found = read_pids(shown)
    assert found["trainer"] == before["trainer"] and found["reward"] == before["reward"], shown
    assert not set(found["policy"]) & set(before["policy"]), "their last call had failed"
    assert "policy:replica0 is started anew" not in shown, "that is a line of the log"
    third = drive(folder, 3, "end", begins=True)
    anew = read_pids(third.communicate(timeout=400)[0])
    assert third.returncode == 0
    assert all(not set(anew[name]) & set(found[name]) for name in found), "without a checkpoint none can be used"
    wait_until_none_is_left(folder, 20)
    assert not (folder / NAME).exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_second_driver_is_refused_and_the_first_goes_on(folder):
    first = drive(folder, 5, "stay")
    assert first.stdout is not None
    while not (line := first.stdout.readline()).startswith("{"):
        assert line, "it has ended"
    second = drive(folder, 6, "end")
    assert "belongs to a run that is still going" in second.communicate(timeout=200)[0]
    (folder / ".lock").unlink()  # as on a file system that has none
    third = drive(folder, 1, "end", waits=True)
    assert "is led by another driver" in third.communicate(timeout=200)[0]
    assert first.poll() is None
    alive = {process.pid for process in processes_of({"output": str(folder)})}
    assert alive.issuperset(pid for pids in json.loads(line)["pids"].values() for pid in pids)
    first.kill()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_orphans_end_by_themselves(folder):
    first = drive(folder, 1, "orphan")
    shown = first.communicate(timeout=400)[0]
    assert read_pids(shown) and processes_of({"output": str(folder)}), shown
    wait_until_none_is_left(folder, 90)
