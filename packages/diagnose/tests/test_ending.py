"""What a run adds to its error: three lines at most, only where a rule is certain, and never instead of the error."""

import time

import pytest

from coalign.cluster.batch_ref import WorkerFailure
from coalign.cluster.future import Call, WorkerError
from coalign.launch.run import _logged  # pyright: ignore[reportPrivateUsage]
from coalign.run_files.state import StateFile
from coalign_diagnose import ending
from coalign_diagnose.ending import explain_ending

TRACE = (
    'Traceback (most recent call last):\n  File "/x/site-packages/adamw.py", line 1, in _init_group\n'
    "    state['exp_avg'] = zeros(p)\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
)


def worker_error():
    return WorkerError(
        Call("trainer", "train_step"), "trainer, rank 1", WorkerFailure("OutOfMemoryError", "CUDA out", TRACE)
    )


def test_a_certain_cause_is_added_in_three_lines(tmp_path):
    begun = time.process_time()
    said = explain_ending(worker_error(), tmp_path)
    assert said is not None and time.process_time() - begun < 5.0
    first, second, third = said.splitlines()
    assert first == "cause: device memory ran out in the optimizer step (2.00 GiB asked for)"
    assert second.startswith("do: ") and "models.*.optimizer.name" in second
    assert third == f"`coalign diagnose {tmp_path}` shows more"


def test_what_says_enough_itself_gets_nothing(tmp_path):
    for error in (ValueError("data.train: no such file"), KeyError("x"), KeyboardInterrupt(), RuntimeError("odd")):
        assert explain_ending(error, tmp_path) is None


def test_errors_of_coalign_itself_say_what_to_do_and_get_nothing(tmp_path):
    from coalign.hub import HubError

    assert explain_ending(HubError("there is no model 'x' here and no model of this name on the hub"), tmp_path) is None


def test_a_diagnosis_that_fails_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(ending, "judge", lambda logs: 1 / 0)
    assert explain_ending(worker_error(), tmp_path) is None


class Folder:
    def __init__(self, path):
        self.path, self.state = path, StateFile(path)


class Screen:
    def handler(self):
        import logging

        return logging.NullHandler()


def test_a_run_raises_its_own_error_with_the_lines_as_a_note(tmp_path):
    error = worker_error()
    with pytest.raises(WorkerError) as raised, _logged(Folder(tmp_path), Screen()):  # pyright: ignore[reportArgumentType]
        raise error
    assert raised.value is error
    [note] = error.__notes__
    assert note.startswith("cause: device memory ran out in the optimizer step") and len(note.splitlines()) == 3
    assert "the run ended with an error" in (tmp_path / "log.txt").read_text()
